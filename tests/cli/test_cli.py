"""The command line: what each command prints, as text and as JSON, and its exit code. Users never see a traceback."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import strobe
from strobe.bench import cases, machine, plot, rivals, roofline
from strobe.bench.cases import Case
from strobe.bench.run import circumstances
from strobe.cli import main as cli
from strobe.cli.main import main
from strobe.kernels import FAMILIES

TINY = [
    Case("dense_tiny", 1, 16, 2, 0, 8, dtype=torch.float32),
    Case("causal_tiny", 1, 16, 2, 0, 8, dtype=torch.float32, causal=True),
    Case("causal_tiny_backward", 1, 16, 2, 0, 8, dtype=torch.float32, causal=True, backward=True),
]
QUICK = ["--rounds", "1", "--device", "cpu", "--no-plot"]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cases.SUITES, "cpu", TINY)
    monkeypatch.setattr(roofline, "_matmul_tflops", lambda device, dtype: 1.0)
    monkeypatch.setattr(roofline, "_copy_gbps", lambda device: 10.0)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]):
    """Run a command that cannot be carried out: exit code 2, one message on standard error, nothing on standard
    output."""

    def run(*argv: str) -> str:
        assert main(argv) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.startswith("strobe: ") and "Traceback" not in said.err
        return said.err

    return run


# ---------------------------------------------------------------- env, check, demo


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (lines["strobe"], lines["torch"]) == (strobe.__version__, torch.__version__) and "interpret=" in lines[
        "environment"
    ]
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == lines.keys()


def test_check_passes_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    assert capsys.readouterr().out.endswith("PASS\n")
    assert main(["check", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] and {"torch", "triton", "compiler", "gpu", "sdpa", *FAMILIES} <= {
        check["name"] for check in found["checks"]
    }
    assert {check["state"] for check in found["checks"] if check["name"] in ("cpu", "sdpa")} == {"PASS"}


def test_check_says_which_backend_sdpa_picks_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    words = machine._sdpa().words
    assert re.fullmatch(
        r"plain: [A-Z_]+; after strobe\.integrations\.sdpa\.enable\(\): FLASH_ATTENTION of STROBE, run by \w+\.forward",
        words,
    )
    with torch.nn.attention.sdpa_kernel(
        torch.nn.attention.SDPBackend.MATH
    ):  # the user has switched flash attention off
        assert machine._sdpa() == (
            "sdpa",
            "FAIL",
            "plain: MATH; after strobe.integrations.sdpa.enable(): MATH, run by torch",
        )
    monkeypatch.delattr(torch.nn.attention, "restore_flash_attention_impl")
    assert machine._sdpa().state == "SKIP" and "torch 2.11" in machine._sdpa().words


def test_check_fails_on_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = machine.ops.run
    monkeypatch.setattr(machine.ops, "run", lambda call: (1.1 * right(call)[0], right(call)[1]))
    assert main(["check", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    cpu = next(check for check in found["checks"] if check["name"] == "cpu")
    assert not found["passed"] and cpu["state"] == "FAIL" and cpu["words"]
    assert main(["check"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAIL: cpu"


@pytest.mark.parametrize(
    ("installed", "asked", "gpu", "state"),
    [
        ("3.6.0", ["triton==3.6.0"], True, "PASS"),
        ("3.6.0", ["triton==3.7.1; platform_system == 'Linux'"], True, "FAIL"),
        ("3.6.0", ["filelock"], False, "PASS"),
        ("3.5.1", ["triton==3.5.1"], True, "FAIL"),
        ("3.10.0", ["triton==3.10.0"], True, "PASS"),
        (None, [], True, "FAIL"),
        (None, [], False, "SKIP"),
    ],
)
def test_triton_must_be_the_one_torch_pins(installed, asked, gpu, state, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "version", lambda package: installed)
    monkeypatch.setattr(machine.metadata, "requires", lambda package: asked)
    check = machine._triton(gpu)
    assert check.state == state
    assert state != "FAIL" or "pip install" in check.words or "or newer" in check.words


# ---------------------------------------------------------------- explain


def test_explain_prints_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--seqlen-q", "64", "--dtype", "float32", "--causal", "--target", "cpu"]) == 0
    q = torch.empty(1, 64, 8, 64)
    said = capsys.readouterr().out
    here = str(strobe.explain(q, q, q, causal=True))
    for line in said.splitlines():
        assert line.startswith("target") or line in here.splitlines()


def test_explain_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    shape = [
        "--batch",
        "2",
        "--seqlen-q",
        "100",
        "--seqlen-k",
        "300",
        "--heads-q",
        "8",
        "--heads-kv",
        "2",
        "--head-dim",
        "192",
        "--head-dim-v",
        "128",
    ]
    assert main(["explain", *shape, "--window", "64", "none", "--backward", "--target", "h200", "--json"]) == 0
    choice = json.loads(capsys.readouterr().out)
    assert "B=2 S_q=100 S_k=300 H_q=8 H_kv=2 D=192 D_v=128 bfloat16, window (64, None)" in choice["problem"]
    assert (
        choice["target"].startswith("H200")
        and choice["forward"]["kernel"]
        and choice["backward"]["flops"] > choice["forward"]["flops"]
    )
    assert choice["forward"]["ceiling_ms"] > 0 and choice["forward"]["bound"].endswith("bound")


def test_explain_knows_peaks_in_16_bits_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for dtype in ("float32", "float64"):
        assert main(["explain", "--dtype", dtype, "--target", "A100"]) == 0
        said = capsys.readouterr().out
        assert f"this target's peak rate in {dtype} is not known" in said and "TFLOP/s =" not in said
        assert main(["explain", "--dtype", dtype, "--target", "A100", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["forward"]["ceiling_ms"] == 0
    assert main(["explain", "--dtype", "float16", "--target", "A100"]) == 0
    assert "at 312 TFLOP/s =" in capsys.readouterr().out


def test_explain_allocates_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--seqlen-q", str(2**30), "--target", "B200", "--causal"]) == 0
    assert f"S_q={2**30}" in capsys.readouterr().out


def test_explain_says_what_is_wrong(refused, capsys: pytest.CaptureFixture[str]) -> None:
    assert "a divisor of q's 8 heads" in refused("explain", "--heads-kv", "3")
    for sizes in (["--seqlen-q", "1" + 20 * "0"], ["--seqlen-q", str(10**11), "--batch", str(10**11)]):
        assert "elements" in refused("explain", *sizes)
    assert "H200" in refused("explain", "--target", "abacus")
    assert "sizes >= 0" in refused("explain", "--batch", "-1")
    with pytest.raises(SystemExit):
        main(["explain", "--window", "a", "b"])
    assert "got 'a', expected a number of keys or none" in capsys.readouterr().err
    assert "kernel" in refused("explain", "--kernel", "abacus")
    assert "no forward kernel" in refused(
        "explain", "--target", "CPU", "--kernel", "portable.forward", "--head-dim", "999"
    )


# ---------------------------------------------------------------- bench


def test_bench_prints_a_table(tiny, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cpu", *QUICK]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["case", "kernel", "ms"] and [line.split()[0] for line in lines[2:5]] == [
        case.name for case in TINY
    ]


def test_bench_json_lines(tiny, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cpu", *QUICK, "--case", "causal_*", "--rivals", "naive,sdpa", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["case"] for row in rows] == ["causal_tiny", "causal_tiny_backward"]
    assert all(set(row["rivals"]) == {"naive", "sdpa"} and row["ms"] > 0 for row in rows)
    file = tmp_path / "rows.jsonl"
    for _ in range(2):
        assert main(["bench", "cpu", *QUICK, "--case", "dense_tiny", "--case", "causal_tiny", "--json", str(file)]) == 0
    assert [json.loads(line)["case"] for line in file.read_text().splitlines()] == ["dense_tiny", "causal_tiny"] * 2


def test_bench_plots(tiny, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["bench", "cpu", *QUICK[:4], "--plot", str(tmp_path / "a.svg"), "--case", "dense_tiny"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"a.svg", "a_roofline.svg"}
    assert "a_roofline.svg" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "drawn"),
    [([], {"strobe_cpu.png", "strobe_cpu_roofline.png"}), (["--no-plot"], set()), (["--json"], set())],
    ids=["default", "no-plot", "json"],
)
def test_bench_draws_unless_it_is_told_not_to(tiny, tmp_path, monkeypatch: pytest.MonkeyPatch, flags, drawn) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "cpu", "--rounds", "1", "--case", "dense_tiny", *flags]) == 0
    assert {path.name for path in tmp_path.iterdir()} == drawn


def test_bench_without_matplotlib_draws_nothing(tiny, tmp_path, capsys, monkeypatch, refused) -> None:
    monkeypatch.setattr(plot, "available", lambda: False)
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "cpu", "--rounds", "1", "--case", "dense_tiny"]) == 0 and not list(tmp_path.iterdir())
    capsys.readouterr()
    assert "strobe-attention[bench]" in refused("bench", "cpu", "--plot", "a.svg")


def test_bench_fails_when_strobe_does(
    tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "cpu", *QUICK, "--case", "dense_tiny", "--kernel", "portable"]) == 1
    assert "strobe did not run dense_tiny: UnsupportedProblem" in capsys.readouterr().out
    monkeypatch.setattr(rivals.interface, "attention", lambda q, k, v, **options: torch.zeros_like(q))
    assert main(["bench", "cpu", *QUICK, "--case", "dense_tiny"]) == 1
    assert "strobe did not run dense_tiny: wrong" in capsys.readouterr().out


def test_bench_lists_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "forward", "--list", "--case", "d128_causal_*", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        "d128_causal_4k",
        "d128_causal_8k",
        "d128_causal_16k",
        "d128_causal_32k",
    ]
    assert main(["bench", "backward", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(cases.SUITES["backward"])


def test_bench_overhead(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from strobe.bench import overhead

    monkeypatch.setattr(overhead, "ROUNDS", 1)
    monkeypatch.setattr(overhead, "CALLS", 5)
    assert main(["bench", "overhead", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        min(found[route] for route in ("call", "flash_attn", "sdpa", "sdpa_strobe")) > 0
        and found["torch"] == torch.__version__
    )
    assert main(["bench", "overhead"]) == 0
    assert "strobe.attention whole" in capsys.readouterr().out
    monkeypatch.setattr(overhead, "measure", None)
    assert main(["bench", "overhead", "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == list(found)[: len(found) - len(circumstances(torch.device("cpu")))]


def test_bench_says_what_is_wrong(tiny, tmp_path, refused) -> None:
    assert "b1_1k" in refused("bench", "decode", "--case", "nonesuch", "--device", "cpu")
    assert "'cudnn'" in refused("bench", "decode", "--rivals", "cudnn", "--device", "cpu")
    assert "over cold caches" in refused("bench", "decode", "--plot", "a.svg", "--device", "cpu")
    assert "the parts of a call" in refused("bench", "overhead", "--case", "call")
    assert "--rounds" in refused("bench", "overhead", "--rounds", "3", "--list")
    assert "one of H100, H200, B200, B300;" in refused("bench", "roofline", "--target", "abacus")
    assert "dense_tiny" in refused("bench", "cpu", "--case", "nonesuch")
    assert "sdpa_mask" in refused("bench", "cpu", "--rivals", "sdpa,abacus")
    assert ">= 1" in refused("bench", "cpu", "--rounds", "0")
    assert "a GPU" in refused("bench", "cpu", "--graph")
    assert "a GPU" in refused("bench", "cpu", "--flush")
    assert "cpu" in refused("bench", "cpu", "--device", "cuda")
    assert ".svg" in refused("bench", "cpu", "--plot", "a.doc")
    assert "written" in refused("bench", "cpu", "--json", str(tmp_path / "no" / "such" / "folder"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_bench_wants_a_gpu_for_gpu_suites(refused) -> None:
    assert "strobe bench cpu" in refused("bench", "forward")
    assert "--device cpu insists" in refused("bench", "decode")
    assert "0 CUDA devices" in refused("bench", "forward", "--device", "cuda:1")


# ---------------------------------------------------------------- the program


@pytest.mark.parametrize(
    ("argv", "code"),
    [(["--help"], 0), (["--version"], 0), (["bench", "--help"], 0), (["abacus"], 2), (["bench", "abacus"], 2)],
)
def test_usage(argv: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == code
    capsys.readouterr()


def test_python_m_strobe() -> None:
    asked = subprocess.run(
        [sys.executable, "-m", "strobe", "explain", "--target", "abacus"], capture_output=True, text=True, timeout=120
    )
    assert asked.returncode == 2 and asked.stdout == "" and asked.stderr.startswith("strobe: target: got 'abacus'")


# ---------------------------------------------------------------- how a command ends


def _strobe(tail: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "-c", f"{sys.executable} -m strobe {tail}"], capture_output=True, text=True, timeout=120
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_no_traceback():
    ended = _strobe("bench forward --list > /dev/full")
    assert ended.returncode == 2 and ended.stderr == "strobe: standard output: No space left on device\n"


def test_a_closed_standard_output_is_no_traceback():
    ended = _strobe("bench forward --list >&-")
    assert ended.returncode == 2 and ended.stderr == "strobe: standard output is closed\n"


def test_a_reader_who_leaves_is_no_traceback():
    """The reader closes before anything is written."""
    ended = _strobe("bench forward --list | (exec <&-; sleep 0.1); exit ${PIPESTATUS[0]}")
    assert ended.returncode == 2 and ended.stderr == ""


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_explain", Mock(side_effect=KeyboardInterrupt))
    assert cli.main(["explain"]) == 130 and capsys.readouterr().err == "strobe: interrupted\n"


def test_no_command_prints_help(capsys):
    assert cli.main([]) == 0 and "explain" in capsys.readouterr().out


def test_targets_are_named_in_any_case(capsys):
    assert cli.main(["bench", "roofline", "--target", "b200"]) == 0 and "B200" in capsys.readouterr().out
    assert cli.main(["explain", "--target", "h200"]) == 0


# ---------------------------------------------------------------- what is not ignored, and what is not imported


def test_bench_roofline_as_json_and_as_a_list(tmp_path, capsys):
    assert main(["bench", "roofline", "--target", "B200", "--list", "--json"]) == 0
    names = json.loads(capsys.readouterr().out)
    assert main(["bench", "roofline", "--target", "B200", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (
        [row["step"] for row in rows] == names
        and len(names) > 5
        and all(row["tensor"] > 0 and row["target"] == "B200" for row in rows)
    )
    assert main(["bench", "roofline", "--target", "B200", "--list"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == names
    file = tmp_path / "rows.jsonl"
    assert main(["bench", "roofline", "--target", "B200", "--json", str(file)]) == 0
    assert [json.loads(line) for line in file.read_text().splitlines()] == rows and "of peak" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flag",
    [
        ["--case", "d128_*"],
        ["--data", "sharp16"],
        ["--rivals", "sdpa"],
        ["--kernel", "portable"],
        ["--rounds", "3"],
        ["--graph"],
        ["--flush"],
        ["--device", "cpu"],
    ],
    ids=lambda flag: flag[0],
)
def test_bench_roofline_refuses_by_name_what_it_would_ignore(flag, refused):
    assert f"{flag[0]}: got a value, expected none beside bench roofline, which runs no kernel" in refused(
        "bench", "roofline", "--target", "B200", *flag
    )


NO_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton", "numpy", "greenlet", "rich"):
            raise ImportError(f"imported {name}")
sys.meta_path.insert(0, Refuse())
sys.argv, sys.orig_argv = ["/usr/bin/strobe", *sys.argv[1:]], []
from strobe.cli.main import main
raise SystemExit(main())
"""
COMMANDS = ("check", "env", "explain", "bench", "sim")


@pytest.mark.parametrize(
    "argv",
    [[], ["--help"], ["-h"], ["--version"], *([name, "--help"] for name in COMMANDS), ["bench", "forward", "-h"]],
    ids=" ".join,
)
def test_help_imports_no_torch(argv):
    shown = subprocess.run([sys.executable, "-c", NO_TORCH, *argv], capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0 and not shown.stderr and ("usage: strobe" in shown.stdout or argv == ["--version"]), (
        shown.stderr
    )
    if argv[:1] in ([], ["--help"], ["sim"]):  # by -m, too
        told = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "strobe", *argv], capture_output=True, text=True, timeout=120
        )
        assert told.stdout == shown.stdout and not re.search(r"\| +(torch|triton|numpy)\b", told.stderr)


@pytest.mark.parametrize("module", ("ladder", "examples.demo"))
def test_help_of_the_repositorys_own_programs_imports_no_torch(module):
    told = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", module, "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert f"usage: python -m {module}" in told.stdout and not re.search(r"\| +(torch|triton|numpy)\b", told.stderr)


def test_a_mistake_is_told_without_torch_and_other_programs_are_whole(tmp_path):
    wrong = subprocess.run(
        [sys.executable, "-c", NO_TORCH, "sim", "--nonesuch", "--help"], capture_output=True, text=True, timeout=120
    )
    assert "imported" not in wrong.stderr
    script = tmp_path / "train.py"
    script.write_text("import strobe; print(strobe.attention.__name__)")
    whole = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, timeout=120)
    assert whole.stdout == "attention\n"
