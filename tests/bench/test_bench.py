"""The bench measures what it says: order of rounds, FLOPs over visible pairs, no wrong or failed contender in
silence."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

import strobe
from strobe import reference
from strobe.bench import cycles_plot, data, earlier, layouts, plot, rivals, roofline, run, table, timer
from strobe.bench.attempt import Attempt
from strobe.bench.cases import SUITES, TOKENS, Case, on_data, suite
from strobe.kernels.protocol import Cost, attention_cost, visible_pairs
from strobe.problem import mask as masks
from strobe.problem.call import Call
from strobe.problem.problem import Problem
from strobe.problem.target import FAKES

CPU = torch.device("cpu")
OPTIONS = run.Options(CPU, rounds=2, sample_ms=0.0)
SOURCE = Path(strobe.__file__).parent
SMALL = Case("small", 2, 24, 4, 2, 16, dtype=torch.float32, causal=True)
TINY = [
    Case("dense", 2, 24, 4, 0, 16, dtype=torch.float32),
    SMALL,
    replace(SMALL, name="window", window=(5, 0)),
    replace(SMALL, name="band", causal=False, window=(3, 4)),
    replace(SMALL, name="documents", lengths=(7, 1, 16)),
    replace(SMALL, name="packed", batch=1, lengths=(7, 1, 16), packed=True),
    replace(SMALL, name="packed window", batch=1, causal=False, window=(2, 1), lengths=(7, 1, 16), packed=True),
    replace(SMALL, name="narrow values", head_dim_v=8),
    replace(SMALL, name="softcap", softcap=2.0),
]


# ---------------------------------------------------------------- timer


def test_rounds_are_interleaved() -> None:
    order: list[str] = []
    functions = {name: (lambda name=name: order.append(name)) for name in "abc"}
    timings = timer.interleave(functions, "cpu", rounds=4, sample_ms=0.0)
    assert order[:9] == list("aaabbbccc")
    rounds = ["".join(order[9 + 3 * n : 12 + 3 * n]) for n in range(4)]
    assert all(sorted(each) == list("abc") for each in rounds) and len(set(rounds)) > 1 and len(order) == 9 + 12
    assert list(timings) == ["a", "b", "c"]


def test_a_sample_is_filled_with_calls() -> None:
    calls = [0]

    def slow() -> None:
        calls[0] += 1
        time.sleep(0.002)

    timing = timer.interleave({"slow": slow}, "cpu", rounds=3, sample_ms=6.0)["slow"]
    assert timing.low_ms >= 2.0 and timing.low_ms <= timing.median_ms <= timing.high_ms
    assert 3 + 3 <= calls[0] <= 3 + 3 * 3  # three to warm up; a sleep may last longer than asked, never shorter


def test_quartiles_and_calls() -> None:
    assert timer.Timing.of([4.0, 1.0, 3.0, 2.0, 5.0]) == (3.0, 2.0, 4.0)
    assert timer.Timing.of([7.0]) == (7.0, 7.0, 7.0)
    assert [timer.calls_per_sample(ms, 10.0) for ms in (100.0, 4.0, 0.0)] == [1, 3, 1000]


# ---------------------------------------------------------------- FLOPs and ceilings


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (4, 4), (2, 5), (5, 2), (9, 13), (13, 9), (16, 1), (1, 16)])
def test_visible_pairs_are_the_masks(rows: int, keys: int) -> None:
    for left in (None, 0, 1, 3, 8, 40):
        for right in (None, 0, 1, 3, 8, 40):
            mask = masks.window(left, right)
            call = Call(*(torch.empty(3, n, 2, 4) for n in (rows, keys, keys))).with_mask(mask)
            assert visible_pairs(Problem.from_call(call)) == 3 * mask.dense(rows, keys).sum().item(), (left, right)


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_cost_counts_the_pairs_that_are_seen(case: Case) -> None:
    x = case.inputs(CPU)
    seen = torch.ones(1, case.seqlen, case.seqlen, dtype=torch.bool)
    if case.masked:
        seen = layouts.dense_mask(case, x)[:, 0]
    pairs = seen.expand(case.batch, -1, -1).sum().item() * case.heads_q
    assert roofline.cost(case, x).flops == 2 * pairs * (case.head_dim + case.width_v)
    back = replace(case, backward=True)
    assert roofline.cost(back, x).flops == 2 * pairs * (3 * case.head_dim + 2 * case.width_v)


def test_percent_of_the_ceiling() -> None:
    target = FAKES["H200"]  # 989 TFLOP/s, 4800 GB/s
    compute, memory = Cost(989e9, 1.0), Cost(1.0, 4.8e9)  # a millisecond each
    assert roofline.percent(compute, target, 2.0) == pytest.approx(50.0)
    assert roofline.percent(memory, target, 4.0) == pytest.approx(25.0)
    assert roofline.tflops(compute, 2.0) == pytest.approx(494.5)


def test_ceilings_are_the_datasheets_or_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline.Target, "of", lambda device: FAKES["H200" if device.type == "cuda" else "CPU"])
    monkeypatch.setattr(roofline, "_matmul_tflops", lambda device, dtype: 3.0)
    monkeypatch.setattr(roofline, "_copy_gbps", lambda device: 20.0)
    assert roofline.ceiling(torch.device("cuda", 0), torch.bfloat16) == FAKES["H200"]
    exact = roofline.ceiling(torch.device("cuda", 0), torch.float32)
    assert (exact.peak_tflops, exact.peak_gbps) == (3.0, 4800)
    cpu = roofline.ceiling(CPU, torch.bfloat16)
    assert (cpu.peak_tflops, cpu.peak_gbps) == (3.0, 20.0)


# ---------------------------------------------------------------- rivals


def _oracle(case: Case, x) -> list[torch.Tensor]:
    call = case.call(x)
    if case.backward:
        return list(reference.backward(call, x.dout)[:3])
    return [reference.forward(call).out]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_every_contender_computes_the_case(case: Case, backward: bool) -> None:
    case = replace(case, backward=backward)
    x = case.inputs(CPU)
    ran = []
    for contender in (*rivals.pick([], CPU), rivals.Strobe()):
        if contender.why_not(case, CPU):
            continue
        out = contender.prepare(case, x)()
        found = torch.autograd.grad(out, (x.q, x.k, x.v), x.dout) if backward else (out,)
        for mine, exact in zip(found, _oracle(case, x)):
            assert mine.shape == exact.shape
            # float32 against float64: some hundred additions of standard normal terms
            torch.testing.assert_close(mine.detach().double(), exact.detach(), rtol=1e-4, atol=1e-5)
        ran.append(contender.name)
    assert {"naive", "strobe"} <= set(ran) and len(ran) >= (2 if case.softcap else 3)


def test_gpu_rivals_say_why_not_on_a_cpu() -> None:
    for name in rivals.HOME["cuda"]:
        assert "cuda" in (rivals.RIVALS[name].why_not(SMALL, CPU) or "")
    for name in rivals.HOME["cpu"]:
        assert "cpu" in (rivals.RIVALS[name].why_not(SMALL, torch.device("cuda")) or "")
    huge = replace(SMALL, seqlen=2**17)
    assert "GiB" in (rivals.RIVALS["naive"].why_not(huge, CPU) or "")


def test_rivals_with_versions_of_their_own_are_named_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "version", {"flash-attn-4": "4.0.0b36"}.get)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    assert run.versions_of(["flash", "cudnn", "fa4", "strobe @HEAD"]) == {"cudnn": "91002", "fa4": "4.0.0b36"}


@pytest.mark.parametrize("case", [TINY[0], TINY[1], TINY[2], TINY[4], TINY[5]], ids=lambda case: case.name)
def test_flash_attention_4_is_called_as_it_wants(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with its signatures, made of the oracle: the arguments must mean the case."""

    def dense(q, k, v, *, softmax_scale, causal, window_size):
        band = masks.causal() if causal else masks.window(*window_size)
        return (reference.forward(Call(q, k, v, scale=softmax_scale).with_mask(band)).out, None)

    def varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size):
        assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
        band = masks.causal() if causal else masks.window(*window_size)
        call = Call(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, scale=softmax_scale)
        return (reference.forward(call.with_mask(band)).out, None)

    cute = ModuleType("flash_attn.cute")
    cute.__dict__.update(flash_attn_func=dense, flash_attn_varlen_func=varlen)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    x = case.inputs(CPU)
    assert rivals.Fa4().why_not(case, torch.device("cuda")) is None
    torch.testing.assert_close(rivals.Fa4().prepare(case, x)(), _oracle(case, x)[0])


def test_flash_attention_4_missing_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    assert "flash-attn-4" in (rivals.Fa4().why_not(SMALL, torch.device("cuda")) or "")


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_flex_masks_are_the_cases(case: Case) -> None:
    x = case.inputs(CPU)
    admits = layouts.mask_mod(case, CPU)
    row, key = torch.arange(case.seqlen)[:, None], torch.arange(case.seqlen)[None, :]
    expected = (
        layouts.dense_mask(case, x)[0, 0] if case.masked else torch.ones(case.seqlen, case.seqlen, dtype=torch.bool)
    )
    assert torch.equal(admits(0, 0, row, key).expand_as(expected), expected)


# ---------------------------------------------------------------- rows

SCHEMA = {
    "case", "direction", "dtype", "kernel", "config", "ms", "tflops", "percent_of_ceiling", "ratio", "rivals",
    "versions", "refused", "flops",
    "intensity", "spread", "timing", "l2", "rounds", "peak_tflops", "peak_gbps", "device", "threads", "torch", "triton",
    "cuda", "python", "date",
    "commit", "source_tree", "relative_error", "data", "errors",
}  # fmt: skip


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings that are known, and nothing measured for them."""
    monkeypatch.setattr(roofline, "_matmul_tflops", lambda device, dtype: 1.0)
    monkeypatch.setattr(roofline, "_copy_gbps", lambda device: 10.0)


@pytest.mark.parametrize("backward", [False, True])
def test_a_row(backward: bool, still: None) -> None:
    row = run.measure(replace(SMALL, backward=backward), rivals.pick([], CPU), OPTIONS)
    assert set(row) == SCHEMA and json.loads(json.dumps(row)) == row
    assert row["kernel"] == ("cpu.backward" if backward else "cpu.forward")
    assert set(row["rivals"]) == {"sdpa", "sdpa_mask", "naive"} and not row["refused"]
    assert row["tflops"] == pytest.approx(row["flops"] / row["ms"] / 1e9, rel=1e-3)
    assert row["ratio"] == pytest.approx(min(row["rivals"].values()) / row["ms"], rel=1e-3)
    assert set(row["spread"]) == {"strobe", *row["rivals"]} and row["versions"] == {}
    assert row["relative_error"] < run.AGREE[torch.float32]
    assert table.rival_tflops(row, "naive") == row["flops"] / row["rivals"]["naive"] / 1e9


class _Broken:
    def __init__(self, name: str, function):
        self.name, self.function = name, function

    def why_not(self, case, device):
        return None

    def prepare(self, case, x):
        return lambda: self.function(rivals.Naive().prepare(case, x)())


def _raise(_):
    raise ValueError("no luck today\nsecond line")


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_case_asks_every_contender(
    deterministic: bool, still: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours and SDPA by torch's switch, which is put back; FlashAttention-4, whose function has a word for it, by
    that."""
    asked: list[tuple] = []
    prepare = rivals.Strobe.prepare

    def noted(self, case, x):
        asked.append((torch.are_deterministic_algorithms_enabled(), self.choice(case, x).problem.deterministic))
        return prepare(self, case, x)

    monkeypatch.setattr(rivals.Strobe, "prepare", noted)
    case = replace(SMALL, backward=True, deterministic=deterministic)
    row = run.measure(case, [], OPTIONS)
    assert asked == [(deterministic, deterministic)] and row["ms"] and not torch.are_deterministic_algorithms_enabled()
    assert sys.modules["torch.utils.deterministic"].fill_uninitialized_memory


def test_failed_and_wrong_rivals_are_reported(still: None, capsys: pytest.CaptureFixture[str]) -> None:
    broken = [
        _Broken("off", lambda out: 1.01 * out),
        _Broken("nan", lambda out: out * float("nan")),
        _Broken("raises", _raise),
    ]
    row = run.measure(SMALL, [*rivals.pick(["naive"], CPU), *broken], OPTIONS)
    assert set(row["rivals"]) == {"naive"} and set(row["refused"]) == {"off", "nan", "raises"}
    assert row["refused"]["off"].startswith("wrong: differs from float64 by 0.01")
    assert row["refused"]["nan"].startswith("wrong")
    assert row["refused"]["raises"] == "ValueError: no luck today"
    table.bench([row])
    assert "raises did not run small: ValueError: no luck today" in capsys.readouterr().out


BROKEN = "\n\ndef attention(*_, **__):\n    raise ValueError(f'no luck in {__name__}')\n"


def _copied(to: Path, behind: str = "") -> Path:
    """The package as src/strobe of a new tree, with something behind its door's code."""
    shutil.copytree(SOURCE, to / "src" / "strobe", ignore=shutil.ignore_patterns("__pycache__"))
    with (to / "src" / "strobe" / "interface" / "attention.py").open("a") as door:
        door.write(behind)
    return to / "src"


def test_strobe_as_it_was_is_a_rival(still: None, tmp_path: Path) -> None:
    same = rivals.pick([f"@{_copied(tmp_path / 'same')}"], CPU)
    other = rivals.pick([f"@{_copied(tmp_path / 'other', BROKEN)}"], CPU)
    for case in (SMALL, TINY[0], replace(SMALL, backward=True)):
        row = run.measure(case, [*rivals.pick(["naive"], CPU), *same, *other], OPTIONS)
        assert set(row["rivals"]) == {"naive", same[0].name} and row["ms"]
        assert re.fullmatch(
            "ValueError: no luck in strobe_at_[0-9a-f]+.interface.attention", row["refused"][other[0].name]
        )  # its own code, not ours
    row = run.measure(
        replace(SMALL, window=(7, 0)), rivals.pick(["naive", same[0].name], CPU), OPTIONS
    )  # a mask of its own
    assert same[0].name in row["rivals"] and plot.save([row], tmp_path / "bars.png")


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_strobe_as_git_has_it_is_a_rival(still: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _copied(tmp_path, BROKEN)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "broken"]):
        subprocess.run([*git, *words], check=True)
    shutil.copy(SOURCE / "interface" / "attention.py", source / "strobe" / "interface" / "attention.py")
    subprocess.run([*git, "commit", "-qam", "mended"], check=True)
    monkeypatch.setattr(earlier, "_PACKAGE", source / "strobe")
    now, before = rivals.pick(["@HEAD", "@HEAD~1"], CPU)
    row = run.measure(SMALL, [now, before], OPTIONS)
    assert (
        set(row["rivals"]) == {now.name}
        and row["refused"][before.name] == f"ValueError: no luck in strobe_at_{before.name[1:]}.interface.attention"
    )
    assert re.fullmatch("@[0-9a-f]{7,}", now.name) and now.name != before.name
    for name in ("@HEAD~2", "@", "@--help", f"@{tmp_path}"):
        with pytest.raises(
            strobe.InvalidProblem, match="expected a git revision of the tree that strobe runs from, or a folder"
        ):
            rivals.pick([name], CPU)
    monkeypatch.setattr(earlier, "_PACKAGE", tmp_path / "elsewhere" / "strobe")  # an installed package
    with pytest.raises(strobe.InvalidProblem, match="expected a git revision"):
        rivals.pick(["@HEAD"], CPU)


def test_a_wrong_kernel_is_never_fast(still: None, monkeypatch: pytest.MonkeyPatch) -> None:
    right = rivals.interface.attention
    monkeypatch.setattr(rivals.interface, "attention", lambda *tensors, **options: 1.01 * right(*tensors, **options))
    row = run.measure(SMALL, rivals.pick([], CPU), OPTIONS)
    assert row["ms"] is None and row["tflops"] is None and row["ratio"] is None
    assert row["refused"]["strobe"].startswith("wrong") and row["rivals"]


def test_gradients_that_cancel_are_judged_by_float64(still: None) -> None:
    """One key takes all weight, so dq is rounding alone: kernels differ by its norm, and none is wrong. A scaled one
    is.
    """
    case = replace(
        SMALL, name="sink", batch=1, heads_q=2, heads_kv=2, dtype=torch.bfloat16, data="sink100", backward=True
    )
    row = run.measure(case, rivals.pick(["naive", "sdpa"], CPU), OPTIONS)
    assert row["relative_error"] > 10 * run.AGREE[torch.bfloat16] and row["ms"] and not row["refused"]
    broken = [_Broken("doubled", lambda out: 2 * out)]
    row = run.measure(case, [*rivals.pick(["naive"], CPU), *broken], OPTIONS)
    assert "float64" in row["refused"]["doubled"] and set(row["rivals"]) == {"naive"}
    other_head = [_Broken("other head", lambda out: torch.cat([out[:, :, :1], 2 * out[:, :, 1:]], 2))]
    row = run.measure(case, [*rivals.pick(["naive"], CPU), *other_head], OPTIONS)
    assert "float64" in row["refused"]["other head"] and set(row["rivals"]) == {"naive"} and row["ms"]


def test_a_kernel_that_cannot_run_the_case_is_a_reason(still: None) -> None:
    row = run.measure(SMALL, rivals.pick(["naive"], CPU), OPTIONS._replace(kernel="portable"))
    assert row["ms"] is None and row["refused"]["strobe"].startswith("UnsupportedProblem") and row["rivals"]["naive"]
    assert "needs a GPU of sm_80 or later" in row["refused"]["strobe"]


def test_no_rival_is_no_ratio(still: None) -> None:
    row = run.measure(replace(SMALL, causal=False), rivals.pick(["sdpa_mask"], CPU), OPTIONS)
    assert row["ms"] > 0 and row["ratio"] is None and row["relative_error"] is None
    assert "nothing to mask" in row["refused"]["sdpa_mask"]


def test_rows_are_written_as_they_come(still: None, tmp_path) -> None:
    with (tmp_path / "rows.jsonl").open("a") as file:
        for count, row in enumerate(run.rows(TINY[:2], rivals.pick(["naive"], CPU), OPTIONS, file), 1):
            lines = (tmp_path / "rows.jsonl").read_text().splitlines()
            assert len(lines) == count and json.loads(lines[-1]) == row


def test_an_attempt_keeps_interrupts_and_reasons() -> None:
    with pytest.raises(KeyboardInterrupt), Attempt():
        raise KeyboardInterrupt
    with Attempt() as attempt:
        pass
    assert attempt.reason is None
    with Attempt() as attempt:
        import warnings

        warnings.warn("head_dim must be at most 256 (Triggered internally at sdp_utils.cpp:1)", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")
    assert attempt.reason == "RuntimeError: No available kernel. Aborting execution.; head_dim must be at most 256"


# ---------------------------------------------------------------- suites, plots


def test_suites() -> None:
    for name, cases in SUITES.items():
        assert len({case.name for case in cases}) == len(cases)
        assert all(not case.lengths or sum(case.lengths) == case.seqlen for case in cases)
        assert suite(name) == cases
    dense = [case for case in suite("forward", ["d64_*", "d128_*", "d256_*", "short_*"]) if not case.window]
    assert len(dense) == 23 and all(case.batch * case.seqlen == max(TOKENS, case.seqlen) for case in dense)
    plain = [case.name for case in SUITES["backward"] if not case.deterministic]
    assert [case.name for case in SUITES["forward"]] == plain and len(SUITES["backward"]) == len(plain) + 2
    assert all(case.backward for case in SUITES["backward"]) and not any(case.backward for case in SUITES["forward"])
    with pytest.raises(strobe.InvalidProblem, match="nonesuch"):
        suite("cpu", ["dense_*", "nonesuch"])


def _scores(case: Case) -> torch.Tensor:
    """[S, S] of head 0, in nats."""
    x = case.inputs(CPU)
    return (x.q[0, :, 0].double() @ x.k[0, :, 0].double().T) * case.head_dim**-0.5


def test_families_of_inputs_do_what_they_say() -> None:
    base = Case("scores", seqlen=1024, heads_q=2, dtype=torch.float32)
    scores = {case.data: _scores(case) for case in on_data([base], "all", backward=False)}
    assert list(scores) == list(data.NAMES) and len(scores) == 16
    for n in (2, 4, 8, 16):
        assert scores[f"sharp{n}"].std().item() == pytest.approx(n, rel=0.05)
    for n in (3, 6, 12):
        assert scores[f"first1x{n}"][:, 0].std() / scores["normal"][:, 0].std() == pytest.approx(n, rel=1e-4)
    for n in (6, 12, 24, 100):
        others = scores[f"sink{n}"][:, 1:]
        assert (scores[f"sink{n}"][:, 0].mean() - others.mean()).item() == pytest.approx(
            n, abs=0.2
        ) and others.std() < 1.2
    for name, small, large in (("grow", slice(64), slice(-64, None)), ("shrink", slice(-64, None), slice(64))):
        assert scores[name][:, small].std() < 0.2 * scores[name][:, large].std()
    loud = scores["outliers"].std(0) > 8
    assert loud.sum().item() == pytest.approx(1024 / 64, abs=12) and scores["outliers"].std(0)[~loud].max() < 3
    near, far = scores["rotary"].diagonal().mean(), scores["rotary"].diagonal(-512).mean()
    assert near == pytest.approx(12, abs=0.5) and far < near - 4


def test_documents_have_a_first_key_each() -> None:
    case = Case("packed", seqlen=12, heads_q=1, head_dim=16, lengths=(5, 7), packed=True, dtype=torch.float32)
    plain, first = case.inputs(CPU).k, replace(case, data="first1x12").inputs(CPU).k
    assert [n for n in range(12) if not torch.equal(plain[n], first[n])] == [0, 5]


def test_inputs_of_a_file(tmp_path: Path, still: None) -> None:
    q, k = torch.randn(2, 24, 4, 16), torch.randn(2, 24, 2, 16)
    torch.save({"q": q, "k": k, "v": k}, tmp_path / "trained.pt")
    (case,) = on_data(suite("forward"), str(tmp_path / "trained.pt"), backward=False)
    assert (case.name, case.seqlen, case.heads_q, case.groups, case.head_dim, case.causal) == (
        "trained",
        24,
        4,
        2,
        16,
        True,
    )
    assert torch.equal(case.inputs(CPU).q, q)
    row = run.measure(case, rivals.pick(["naive"], CPU), OPTIONS)
    assert row["data"].endswith("trained.pt") and row["rivals"] and not row["refused"]
    torch.save({"q": q, "k": k}, tmp_path / "half.pt")
    for name in ("sharp3", str(tmp_path / "half.pt"), str(tmp_path / "none.pt")):
        with pytest.raises(strobe.InvalidProblem, match="--data"):
            on_data(suite("forward"), name, backward=False)


def test_of_families_tables_and_plots_show_the_normal_and_the_worst(
    still: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        run.measure(replace(SMALL, data=name), rivals.pick(["naive"], CPU), OPTIONS)
        for name in ("normal", "sharp4", "outliers")
    ]
    rows = [row | {"ratio": ratio} for row, ratio in zip(rows, (1.2, 1.1, 0.9))]
    table.bench(rows)
    told = capsys.readouterr().out
    assert "normal" in told and "outliers" in told and "sharp4" not in told
    assert plot.save(rows, tmp_path / "bars.svg") and "outliers" in (tmp_path / "bars.svg").read_text()


def test_strobe_against_itself_is_no_rival(still: None) -> None:
    row = run.measure(SMALL, rivals.pick(["naive", "self"], CPU), OPTIONS)
    assert set(row["rivals"]) == {"naive", "self"} and row["ratio"] == pytest.approx(
        row["rivals"]["naive"] / row["ms"], rel=1e-3
    )


@dataclass(frozen=True)
class _Newer(Case):
    """A case with a field that older revisions do not have."""

    another: int = 0


def test_an_older_revision_is_not_asked_for_fields_it_lacks(still: None, tmp_path: Path) -> None:
    (same,) = rivals.pick([f"@{_copied(tmp_path)}"], CPU)
    row = run.measure(_Newer(**vars(SMALL)), [same], OPTIONS)
    assert set(row["rivals"]) == {same.name}


def test_plots(still: None, tmp_path) -> None:
    rows = [run.measure(case, rivals.pick([], CPU), OPTIONS) for case in TINY[:3]]
    rows.append(
        run.measure(SMALL, rivals.pick(["naive"], CPU), OPTIONS._replace(kernel="portable"))
    )  # ours failed: bars without it
    written = plot.save(rows, tmp_path / "bench.png")
    assert [path.name for path in written] == ["bench.png", "bench_roofline.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000 for path in written)
    assert plot.save(rows, tmp_path / "bench.svg")[1].read_text().rstrip().endswith("</svg>")
    assert plot.save([], tmp_path / "none.png") == []
    assert set(plot.COLOURS) == set(rivals.RIVALS)
    with pytest.raises(strobe.UnsupportedProblem, match="ends in"):
        plot.check(tmp_path / "bench.xyz")


def test_numbers_of_a_roofline_plot_do_not_overlap() -> None:
    figure_module = pytest.importorskip("matplotlib.figure")
    row = {
        "case": "d128", "intensity": 4000.0, "tflops": 700.0, "percent_of_ceiling": 71.0,
        "rivals": {"fa4": 1.0, "self": 0.1},
        "flops": 5e11, "peak_tflops": 989.0, "peak_gbps": 4800.0, "dtype": "bfloat16", "device": "NVIDIA H200: sm_90",
        "torch": "2.11.0", "date": "2026-11-24", "commit": None,
    }  # fmt: skip
    rows = [row | {"intensity": 4000.0 * 1.02**n, "tflops": 700.0 + n} for n in range(12)]
    figure = figure_module.Figure(layout="constrained", dpi=160)
    plot._roofline(figure, rows)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    numbers = [text for text in axes.texts if text.get_text().isdigit()]
    text_alone = pytest.importorskip("matplotlib.text").Text.get_window_extent  # an annotation's includes its arrow
    boxes = [text_alone(text) for text in numbers]
    assert len(boxes) == 12 and all(box.width < 50 for box in boxes)
    assert not any(a.overlaps(b) for place, a in enumerate(boxes) for b in boxes[:place])
    hollow = {line.get_ydata()[0] for line in axes.lines if line.get_markerfacecolor() == "white"}
    assert hollow == {500.0}  # fa4's rate; strobe again is no rival


def test_the_title_of_the_cycles_fits_on_the_page(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    figure_module = pytest.importorskip("matplotlib.figure")
    monkeypatch.setattr(figure_module.Figure, "savefig", lambda self, path: figures.append(self))
    cycles_plot.save(FAKES["B200"], tmp_path / "cycles.png")
    (figure,) = figures
    figure.draw_without_rendering()
    title = figure.get_suptitle() and figure._suptitle.get_window_extent()
    assert title.x0 >= 0 and title.x1 <= figure.bbox.width


def test_tables_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(table, "pretty", lambda: True)
    table.show(["case", "ms"], [["dense[0]", 1234.5], ["causal", None]], "title")
    drawn = capsys.readouterr().out
    assert "dense[0]" in drawn and "1234" in drawn and "-" in drawn


def test_a_picture_says_of_all_its_rows_where_they_are_from() -> None:
    row = {
        "device": "NVIDIA H200: sm_90, 132 SMs",
        "torch": "2.11.0",
        "date": "2026-11-24T19:09:13+00:00",
        "commit": "1a577ca",
    }
    later = row | {"date": "2026-11-25T03:21:55+00:00", "commit": None}
    assert (
        plot._where([row, later])
        == "NVIDIA H200: sm_90 · torch 2.11.0 · 2026-11-24, 2026-11-25 · commit 1a577ca, unknown"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_gpu_rows(case: Case, backward: bool, graph: bool) -> None:
    device, lengths = torch.device("cuda"), (64, 8, 184) if case.lengths else ()
    case = replace(
        case, seqlen=256, lengths=lengths, head_dim=64, head_dim_v=0, dtype=torch.bfloat16, backward=backward
    )
    row = run.measure(
        case, rivals.pick(["flash", "cudnn", "efficient", "math"], device), OPTIONS._replace(device=device, graph=graph)
    )
    assert row["ms"] and (row["rivals"] or case.softcap or (graph and backward)), row["refused"]


def test_attention_cost_of_both_directions() -> None:
    q = torch.empty(1, 8, 2, 16)
    problem = Problem.from_call(Call(q, q, q))
    assert attention_cost(problem, backward=True).flops == 2.5 * attention_cost(problem).flops
