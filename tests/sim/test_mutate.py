"""Mutants (exactly the text that changes), scenes (arguments as text, a module with other source), campaigns and their
ledger.
"""

import ast
import json
import sys
import textwrap
from difflib import SequenceMatcher
from pathlib import Path

import pytest
import torch

from strobe.kernels.device.dialect import TensorDescriptor
from strobe.sim import SimulationFault
from strobe.sim.campaign import Campaign, campaign, explain, summary, survivors
from strobe.sim.mutate import MODULE, PROBE, mutants
from strobe.sim.scene import Scene, SceneError, argument, load, module_name, replaced, tensors

DOUBLING = Path(__file__).with_name("doubling.py")
TILE = ["f32[16,32]", "nan:f32[16,32]"]


# ---------------------------------------------------------------- mutants


def changes(body: str, decorator: str = "@gluon.jit") -> list[tuple[str, str]]:
    """(kind, the lines it changes as they are then) for each mutant of a function with this body."""
    source = f"{decorator}\ndef kernel(a, b, c):\n" + textwrap.indent(textwrap.dedent(body).strip("\n"), "    ") + "\n"
    found = []
    for mutant in mutants(source):
        ast.parse(mutant.source), ast.parse(mutant.probe)
        assert mutant.source != source and PROBE in mutant.probe
        found.append((mutant.kind, _new_lines(source, mutant.source)))
    return found


def _new_lines(old: str, new: str) -> str:
    before, after = old.splitlines(), new.splitlines()
    blocks = SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return "\n".join(line.strip() for kind, _, _, start, end in blocks if kind != "equal" for line in after[start:end])


@pytest.mark.parametrize(
    "statement, expected",
    [
        ("mbarrier.wait(a, b)", [("drop wait", "pass"), ("flip parity", "mbarrier.wait(a, (b) ^ 1)")]),
        (
            "mbarrier.wait(a, phase=b & 1)",
            [("drop wait", "pass"), ("flip parity", "mbarrier.wait(a, phase=(b & 1) ^ 1)")],
        ),
        (
            "mbarrier.wait(a, (b), pred=c)",
            [("drop wait", "pass"), ("flip parity", "mbarrier.wait(a, ((b) ^ 1), pred=c)")],
        ),
        ("mbarrier.arrive(a, count=1)", [("drop arrive", "pass")]),
        ("async_copy.mbarrier_arrive(a)", [("drop arrive", "pass")]),
        ("mbarrier.expect(a, b)", [("drop expect", "pass"), ("half expect", "mbarrier.expect(a, (b) // 2)")]),
        (
            "mbarrier.expect(a, bytes=b + c)",
            [("drop expect", "pass"), ("half expect", "mbarrier.expect(a, bytes=(b + c) // 2)")],
        ),
        ("mbarrier.init(a, count=2)", [("init count + 1", "mbarrier.init(a, count=(2) + 1)")]),
        ("init_barriers(a, 2)", [("init count + 1", "init_barriers(a, (2) + 1)")]),
        ("a = warpgroup_mma_wait(1, deps=[a])", [("wgmma_wait(n + 1)", "a = warpgroup_mma_wait((1) + 1, deps=[a])")]),
        (
            "a = warpgroup_mma_wait(num_outstanding=b)",
            [("wgmma_wait(n + 1)", "a = warpgroup_mma_wait(num_outstanding=(b) + 1)")],
        ),
        (
            "a = warpgroup_mma_wait(deps=[a])",
            [("wgmma_wait(n + 1)", "a = warpgroup_mma_wait(deps=[a], num_outstanding=0 + 1)")],
        ),
        ("fence_async_shared()", [("drop fence", "pass")]),
        ("fence_async_global()", [("drop fence", "pass")]),
        ("tcgen05_commit(a)", [("drop commit", "pass")]),
        ("gl.inline_asm_elementwise('nop;', '=r', [], gl.int32, False, 1)", [("drop asm", "pass")]),
    ],
)
def test_each_statement_has_its_mutants(statement, expected):
    assert changes(statement) == expected


@pytest.mark.parametrize("name", ["tma.store_wait", "tma_store_wait", "gl.nvidia.hopper.tma.store_wait", "store_wait"])
def test_a_wait_for_stores_under_any_name(name):
    assert changes(f"{name}(0)") == [("drop store_wait", "pass"), ("store_wait(n + 1)", f"{name}((0) + 1)")]
    assert changes(f"{name}(pendings=b)") == [
        ("drop store_wait", "pass"),
        ("store_wait(n + 1)", f"{name}(pendings=(b) + 1)"),
    ]


@pytest.mark.parametrize(
    "wait, commit", [("cp_async_wait", "cp_async_commit"), ("async_copy.wait_group", "async_copy.commit_group")]
)
def test_groups_of_copies(wait, commit):
    assert changes(f"{commit}()\n{wait}(a - 2)") == [
        ("drop commit", "pass"),
        ("drop wait_group", "pass"),
        ("wait_group(n + 1)", f"{wait}((a - 2) + 1)"),
    ]
    assert ("wait_group(n + 1)", f"{wait}(num_outstanding=0 + 1)") in changes(f"{wait}()")
    assert changes("tma_store_drain()\ntma_store_drain(a)") == [
        ("drop store_drain", "pass"),
        ("drop store_drain", "pass"),
        ("store_drain(n + 1)", "tma_store_drain((a) + 1)"),
    ]


@pytest.mark.parametrize("module", ["mbarrier", "gl.nvidia.hopper.mbarrier", "hopper.mbarrier"])
def test_barriers_under_any_path_but_not_their_names_alone(module):
    assert [kind for kind, _ in changes(f"{module}.wait(a, b)\n{module}.arrive(a)")] == [
        "drop wait",
        "flip parity",
        "drop arrive",
    ]
    assert changes("wait(a, b)\nchannel.wait(a, b)\nchannel.arrive(a)\ninit(a, 1)") == []


def test_orders_of_atomics():
    found = changes(
        'a = gl.atomic_add(b, 1, sem="acq_rel")\ngl.atomic_cas(b, 0, 1, sem="relaxed")\ngl.atomic_xchg(b, 0, '
        'sem="release", scope="gpu")'
    )
    assert found == [
        ("weaken order", 'a = gl.atomic_add(b, 1, sem="relaxed")'),
        ("weaken order", 'gl.atomic_xchg(b, 0, sem="relaxed", scope="gpu")'),
    ]


def test_a_barrier_goes_with_its_predicate():
    found = changes("tcgen05_mma(a, b, c, mbarriers=[x, y.index(0)], mbarrier_preds=[True, b])")
    assert found == [
        ("drop mbarriers entry x", "tcgen05_mma(a, b, c, mbarriers=[y.index(0)], mbarrier_preds=[b])"),
        ("drop mbarriers entry y.index(0)", "tcgen05_mma(a, b, c, mbarriers=[x], mbarrier_preds=[True])"),
    ]
    assert changes("tcgen05_mma(a, b, c, mbarriers=(x,))") == [
        ("drop mbarriers entry x", "tcgen05_mma(a, b, c, mbarriers=[])")
    ]


def test_inline_ptx_becomes_weaker():
    found = changes("""
        gl.inline_asm_elementwise("bar.sync 9, 256; mov.u32 $0, 0;", "=r", [])
        x = gl.inline_asm_elementwise("ld.acquire.gpu.b32 $0, [$1]; cp.async.bulk.wait_group 0;", "=r,l", [a])
        y = gl.inline_asm_elementwise("fence.proxy.async.global; fence.acq_rel.gpu;", "=r", [])
    """)
    call = "gl.inline_asm_elementwise"
    assert found == [
        ("arrive only", f"""{call}('bar.arrive 9, 256; mov.u32 $0, 0;', "=r", [])"""),
        ("drop asm", "pass"),
        (
            "wait for reads only",
            f"""x = {call}('ld.acquire.gpu.b32 $0, [$1]; cp.async.bulk.wait_group.read 0;', "=r,l", [a])""",
        ),
        ("weaken order", f"""x = {call}('ld.relaxed.gpu.b32 $0, [$1]; cp.async.bulk.wait_group 0;', "=r,l", [a])"""),
        ("drop fence", f"""y = {call}(' fence.acq_rel.gpu;', "=r", [])"""),
        ("drop fence", f"""y = {call}('fence.proxy.async.global; ', "=r", [])"""),
        ("weaken order", f"""y = {call}('fence.proxy.async.global; fence.relaxed.gpu;', "=r", [])"""),
    ]


def test_inline_ptx_in_an_f_string():
    (found,) = changes('x = gl.inline_asm_elementwise(f"{a} bar.sync 1; mov.u32 $0, 0;", "=r", [])')
    assert found == ("arrive only", """x = gl.inline_asm_elementwise(f'{a} bar.arrive 1; mov.u32 $0, 0;', "=r", [])""")


def test_text_belongs_to_the_function_it_stands_in():
    source = """
WAIT = "cp.async.bulk.wait_group 0;"

def helper():
    '''Prose; it says wait_group 0, fence.proxy.async; and .acquire'''
    return "bar.sync 1;"

@gluon.jit
def kernel(a):
    '''Also prose; fence.proxy.async;'''
    x = asm("fence.proxy.async;")
"""
    found = [(m.kind, m.line, m.function) for m in mutants(source)]
    assert found == [("wait for reads only", 2, MODULE), ("arrive only", 6, MODULE), ("drop fence", 11, "kernel")]


def test_calls_over_several_lines():
    body = """
        mbarrier.wait(
            a.index(0),  # which
            (b +
             1),
            pred=c,
        )
        mbarrier.arrive(a); mbarrier.arrive(b)
        if c: mbarrier.arrive(c)
    """
    found = dict(enumerate(changes(body)))
    assert found[0] == ("drop wait", "pass") and found[1] == ("flip parity", "((b + 1) ^ 1),")
    assert [new for kind, new in found.values() if kind == "drop arrive"] == [
        "pass; mbarrier.arrive(b)",
        "mbarrier.arrive(a); pass",
        "if c: pass",
    ]


@pytest.mark.parametrize("before", ["x = 'Größe → 日本'; ", "x = '\u2028\x0c\x85'; ", "x = '\\x0c'; "])
def test_text_before_the_place_that_is_not_ascii(before):
    found = changes(f"{before}mbarrier.arrive(a)  # Ä")
    assert len(found) == 1 and found[0][0] == "drop arrive" and found[0][1].endswith("; pass  # Ä")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_ends_of_lines(end):
    source = end.join(["# ü", "@gluon.jit", "def kernel(a):", "    mbarrier.wait(a, 0)", "    return 1", ""])
    assert [m.source for m in mutants(source)] == [
        source.replace("mbarrier.wait(a, 0)", new) for new in ("pass", "mbarrier.wait(a, (0) ^ 1)")
    ]


@pytest.mark.parametrize(
    "decorator",
    [
        "@gluon.jit",
        "@triton.jit",
        "@jit",
        "@triton.jit(do_not_specialize=['b'])",
        "@noted\n@triton.experimental.gluon.jit",
    ],
)
def test_what_a_jit_function_is(decorator):
    assert [kind for kind, _ in changes("mbarrier.arrive(a)", decorator)] == ["drop arrive"]


@pytest.mark.parametrize("decorator", ["", "@gluon.constexpr_function", "@numba.njit", "@jitter", "@noted(jit)"])
def test_nothing_else_is_changed(decorator):
    assert changes('mbarrier.arrive(a)\nmbarrier.wait(a, b)\ngl.atomic_add(a, 1, sem="release")', decorator) == []


def test_a_method_and_arguments_that_cannot_be_counted():
    source = "class Ring:\n    @gluon.jit\n    def next(self):\n        mbarrier.arrive(self.free)\n"
    assert [str(m) for m in mutants(source)] == ["drop arrive, line 4 of next: mbarrier.arrive(self.free)"]
    assert changes("mbarrier.wait(*a)") == [("drop wait", "pass")]


def test_every_mutant_of_the_specimens_is_one_change_that_parses():
    files = sorted(Path(__file__).parents[1].joinpath("specimens").glob("*.py"))
    found = [mutant for file in files for mutant in mutants(file.read_text())]
    assert len(found) > 150
    for mutant in found:
        ast.parse(mutant.source), ast.parse(mutant.probe)
        assert mutant.source.count("\n") == mutant.probe.count("\n")
    assert len({mutant.source for mutant in found}) == len(found)


# ---------------------------------------------------------------- scenes


def drawn(text: str, seed: int = 0):
    return argument(text, torch.Generator().manual_seed(seed))


def test_arguments():
    for text, dtype in (
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("f32", torch.float32),
        ("fp8e4", torch.float8_e4m3fn),
        ("i32", torch.int32),
    ):
        tensor = drawn(f"{text}[3,4]")
        assert tensor.shape == (3, 4) and tensor.dtype == dtype and tensor.to(torch.float64).abs().sum() > 0
    assert drawn("f32[]").shape == () and drawn("f32[0,2]").shape == (0, 2)
    assert torch.equal(drawn("f32[9]"), drawn("f32[9]")) and not torch.equal(drawn("f32[9]"), drawn("f32[9]", 1))
    assert (
        drawn("nan:f32[2]").isnan().all()
        and drawn("nan:i32[2]").tolist() == [-1, -1]
        and drawn("ones:u8[2]").tolist() == [1, 1]
    )
    assert [drawn(text) for text in ("3", "-3", "0.5", "1e-3", "True", "False", "None", "tma")] == [
        3,
        -3,
        0.5,
        1e-3,
        True,
        False,
        None,
        "tma",
    ]
    whole, tiles = drawn("tma:bf16[64,128]"), drawn("tma:bf16[64,128]/32x64")
    assert isinstance(whole, TensorDescriptor) and whole.block_shape == [64, 128] and tiles.block_shape == [32, 64]


@pytest.mark.parametrize(
    "text, words",
    [
        ("bf17[2]", "got 'bf17' in 'bf17[2]', expected one of bf16, fp16"),
        ("inf:f32[2]", "got 'inf' in 'inf:f32[2]', expected one of tma, nan, zeros, ones"),
        ("f32[2,]", "got 'f32[2,]', expected a tensor such as bf16[64,128]"),
        ("f32[2, 3]", "sizes with commas, no spaces"),
        ("f32[2x3]", "expected a tensor such as"),
        ("f32[2", "expected a tensor such as"),
        ("f32[64,64]/64x64", "a block of 2 sizes after a tma: tensor"),
        ("tma:f32[64,64]/64", "a block of 2 sizes after a tma: tensor"),
        ("tma:i32[64,64]", "expected bf16, fp16 or fp32 in a descriptor"),
        ("tma:bf16[64,60]", "expected what TMA can move"),
    ],
)
def test_arguments_that_are_none(text, words):
    with pytest.raises(SceneError) as refused:
        drawn(text)
    assert words in str(refused.value)


@pytest.mark.parametrize("name", ["kernels.py", "missing.py::run", f"{DOUBLING}::", "::run"])
def test_a_scene_names_a_file_and_a_function(name):
    with pytest.raises(SceneError, match="expected FILE::NAME with an existing file"):
        Scene(name, [])


def test_a_scene_that_cannot_be_called(tmp_path):
    with pytest.raises(SceneError, match=r"has no triple; it has add_one_kernel, double, [a-z_, ]*$") as found:
        Scene(f"{DOUBLING}::triple", [])()
    assert "mbarrier" not in str(found.value)  # imported
    with pytest.raises(SceneError, match=r"double takes \(x, y\); got f32\[2\]: missing a required argument: 'y'"):
        Scene(f"{DOUBLING}::double", ["f32[2]"])()
    with pytest.raises(SceneError, match=r"add_one_kernel takes .*BLOCK.* got z=3: "):
        Scene(f"{DOUBLING}::add_one_kernel", ["z=3"])()
    wrong = tmp_path / "wrong_scene.py"
    for text, words in (
        ("x = 3", "x is 3, expected a function or a kernel"),
        ("def x(:", "SyntaxError"),
        ("import no_such_module", "no_such_module"),
    ):
        wrong.write_text(text)
        with pytest.raises(SceneError, match=words):
            Scene(f"{wrong}::x", [])()
        sys.modules.pop("wrong_scene", None)


def test_a_scene_calls_each_time_with_the_same_fresh_arguments(tmp_path):
    file = tmp_path / "adding.py"
    file.write_text("def add(x, amount=1):\n    x += amount\n    return {'sum': [x.sum()]}\n")
    scene = Scene(f"{file}::add", ["zeros:f32[2]", "amount=3"])
    for _ in range(2):
        x, total = scene()
        assert x.tolist() == [3, 3] and total == 6
    del sys.modules["adding"]


def test_tensors_in_whatever_holds_them():
    x, y = torch.zeros(1), drawn("tma:f32[16,32]")
    assert [id(t) for t in tensors([x, (1, {"a": [x]}), y, None, "x"])] == [id(x), id(x), id(y.base)]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """parts/kernels.py <- parts/inner/launch.py <- parts/scenes.py, by relative imports; parts/other.py stands
    apart."""
    files = {
        "parts/__init__.py": "from .kernels import VALUE",
        "parts/kernels.py": "VALUE = 1",
        "parts/other.py": "LOADED = []",
        "parts/inner/__init__.py": "",
        "parts/inner/launch.py": (
            "from .. import kernels\nfrom ..other import LOADED\ndef value():\n    return kernels.VALUE"
        ),
        "parts/scenes.py": (
            "from .inner.launch import value\nfrom . import VALUE\ndef run():\n    return value(), VALUE"
        ),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path / "parts"
    for name in [name for name in sys.modules if name.partition(".")[0] == "parts"]:
        del sys.modules[name]


def test_a_file_is_imported_as_its_package_would(package):
    assert module_name(package / "inner" / "launch.py") == "parts.inner.launch"
    scenes = load(package / "scenes.py")
    assert scenes.run() == (1, 1) and load(package / "scenes.py") is scenes


def test_replaced_runs_the_changed_source_and_puts_all_back(package, tmp_path):
    scenes = load(package / "scenes.py")
    before = {name: module for name, module in sys.modules.items() if name.startswith("parts")}
    with replaced(package / "kernels.py", "VALUE = 2", tmp_path / "m", package / "scenes.py") as changed:
        assert changed is not scenes and changed.run() == (2, 2)
        assert sys.modules["parts.other"] is before["parts.other"], "what does not import the changed file stays"
    after = {name: module for name, module in sys.modules.items() if name.startswith("parts")}
    assert after == before and scenes.run() == (1, 1) and sys.modules["parts"].kernels is before["parts.kernels"]
    assert load(package / "scenes.py") is scenes


@pytest.mark.parametrize("source", ["raise KeyError('at import')", "VALUE = 2"])
def test_replaced_puts_all_back_after_an_error(package, tmp_path, source):
    load(package / "scenes.py")
    before, finders = (
        {name: module for name, module in sys.modules.items() if name.startswith("parts")},
        list(sys.meta_path),
    )
    with (
        pytest.raises(KeyError),
        replaced(package / "kernels.py", source, tmp_path / "m", package / "scenes.py") as changed,
    ):
        raise KeyError(f"in the run of {changed}")
    assert {name: module for name, module in sys.modules.items() if name.startswith("parts")} == before
    assert sys.meta_path == finders


def test_replaced_forgets_what_was_imported_meanwhile(package, tmp_path):
    (package / "lazy.py").write_text("from .kernels import VALUE")
    (package / "scenes.py").write_text("def run():\n    from . import lazy\n    return lazy.VALUE")
    with replaced(package / "kernels.py", "VALUE = 2", tmp_path / "m", package / "scenes.py") as changed:
        assert changed.run() == 2
    assert load(package / "scenes.py").run() == 1


# ---------------------------------------------------------------- campaigns and the ledger


def test_a_campaign_says_who_noticed_what():
    verdicts = campaign(Scene(f"{DOUBLING}::double", TILE), "sm_90", all_detectors=True)
    assert [(v.mutant.kind, *v.said.values()) for v in verdicts] == [
        ("init count + 1", "deadlock", "deadlock", "deadlock"),
        ("drop expect", "deadlock", "deadlock", "deadlock"),
        ("half expect", "bytes", "bytes", "bytes"),
        ("drop wait", "", "wrong result", "race"),
        ("flip parity", "deadlock", "wrong result", "deadlock"),
        ("drop fence", "", "", "fence"),
        ("drop store_wait", "", "", "unfinished"),
        ("store_wait(n + 1)", "", "", "unfinished"),
    ]
    assert {v.mutant.function for v in verdicts} == {"double_kernel"}, "only what the scene enters"
    assert list(verdicts[0].said) == ["plain run", "schedules", "happens-before"]
    assert summary(verdicts, 1.4) == "8 mutants, 8 noticed (plain run 4, schedules 5, happens-before 8), 1 s"


def test_a_campaign_in_short_stops_at_the_first_who_notices():
    told = []
    verdicts = campaign(
        Scene(f"{DOUBLING}::double_carefully", TILE), "sm_90", [DOUBLING], progress=lambda *counts: told.append(counts)
    )
    assert [list(v.said) for v in verdicts if v.noticed] == [["happens-before"]] * 7
    assert [v.said for v in verdicts if not v.noticed] == [{"happens-before": "", "schedules": ""}] * 2
    assert told == [(n + 1, 9) for n in range(9)]


def test_a_mutant_is_run_only_if_its_call_may_be_reached(tmp_path):
    """A constant branch that is never taken has no mutants, and neither has a function that is not entered."""
    file = tmp_path / "branching.py"
    dead = "    if x_desc.block_shape[0] == 8:\n        mbarrier.wait(\n            ready, 1\n        )\n"
    text = DOUBLING.read_text().replace("    tma_store_wait(0)\n", f"{dead}    tma_store_wait(0)\n", 1)
    file.write_text(text)
    alone, branching = (Campaign(Scene(f"{path}::double", TILE), "sm_90").baseline() for path in (DOUBLING, file))
    assert len(branching.candidates) == len(alone.candidates) == 8 and alone.sources != branching.sources
    assert len(mutants(text)) == len(mutants(DOUBLING.read_text())) + 2
    del sys.modules["branching"]


def test_survivors_are_numbered_among_equal_lines(tmp_path):
    verdicts = campaign(Scene(f"{DOUBLING}::double_carefully", TILE), "sm_90")
    alive = list(survivors(verdicts))
    fence = {"kind": "drop fence", "function": "double_kernel", "text": "fence_async_shared()"}
    assert alive == [fence | {"number": "1"}, fence | {"number": "2"}]

    ledger = tmp_path / "ledger.json"
    name = "drop fence in double_kernel: fence_async_shared() (number {})".format
    assert explain(verdicts, "double", ledger) == ([name(1), name(2)], []), "no ledger explains nothing"
    ledger.write_text(
        json.dumps(
            {
                "double": [alive[0] | {"why": "the other is there"}, alive[1] | {"why": ""}],
                "other": [alive[1] | {"why": "no"}],
            }
        )
    )
    assert explain(verdicts, "double", ledger) == ([name(2)], [])
    ledger.write_text(json.dumps({"double": [fence | {"number": str(n), "why": "so it is"} for n in (1, 2, 3)]}))
    assert explain(verdicts, "double", ledger) == ([], [name(3)])
    assert explain(campaign(Scene(f"{DOUBLING}::double", TILE), "sm_90"), "double", ledger) == (
        [],
        [name(1), name(2), name(3)],
    )


def test_a_survivor_of_a_pair_has_the_number_of_its_line(tmp_path):
    """Of two equal lines the second survives: the noticed first one counts too."""
    file = tmp_path / "pair.py"
    file.write_text(
        DOUBLING.read_text().replace("    tma_store_wait(0)\n", "    tma_store_wait(0)\n    fence_async_shared()\n")
    )
    verdicts = campaign(Scene(f"{file}::double", TILE), "sm_90")
    assert [entry["number"] for entry in survivors(verdicts)] == ["2"]
    del sys.modules["pair"]


def test_a_kernel_with_faults_before_anything_is_changed_is_refused(tmp_path):
    file = tmp_path / "racing.py"
    file.write_text(DOUBLING.read_text().replace("    mbarrier.wait(ready, 0)\n", ""))
    with pytest.raises(SimulationFault, match="race"):
        campaign(Scene(f"{file}::double", TILE), "sm_90")
    del sys.modules["racing"]
