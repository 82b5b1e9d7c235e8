"""A kernel that does not compile or launch is a KernelFault that names it, the cause and the remedy: Triton's own
exceptions, raised by Triton.
"""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import strobe
from strobe.kernels import protocol
from strobe.kernels.hopper.kernel import HopperForward
from strobe.kernels.portable.kernel import PortableForward
from strobe.kernels.runtime.launch_cache import CACHE
from strobe.ops import attention as ops
from strobe.problem.call import Call
from strobe.problem.problem import Problem
from strobe.problem.target import FAKES
from strobe.selection.select import select

triton = pytest.importorskip("triton")


def _fault(monkeypatch: pytest.MonkeyPatch, compile: Callable[[], object], target: str = "A100") -> strobe.KernelFault:
    """What a call raises whose kernel meets what `compile` does."""
    q = torch.zeros(1, 128, 2, 64, dtype=torch.bfloat16)
    call = Call(q, q, q)
    plan = select(Problem.from_call(call), FAKES[target]).forward
    monkeypatch.setattr(type(plan.kernel), "run", lambda *_: compile())
    with pytest.raises(strobe.KernelFault) as raised:
        ops._launch(plan, call, None, {})
    assert str(raised.value).startswith(f"{plan.kernel.name} ({plan.config}) on {target}: got ")
    assert raised.value.__cause__ is not None
    return raised.value


def _build(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Callable[[], object]:
    """Triton's own way from a launcher's text to a module."""
    from triton.runtime.build import compile_module_from_src

    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    return lambda: compile_module_from_src("int no_module;", "launcher")


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    said = str(_fault(monkeypatch, _build(monkeypatch, tmp_path)))
    assert "got RuntimeError: Failed to find C compiler" in said and "install gcc or clang, or name one by CC" in said


def test_a_compiler_that_fails(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "false")
    said = str(_fault(monkeypatch, _build(monkeypatch, tmp_path)))
    assert "got CalledProcessError: exit code 1 of false " in said and "python3-dev" in said


def test_a_compiler_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "/nowhere/cc")
    said = str(_fault(monkeypatch, _build(monkeypatch, tmp_path)))
    assert "expected the program /nowhere/cc; install it, or name another C compiler by CC" in said


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    """Below a file there is no folder, for root neither."""
    (tmp_path / "file").write_text("")
    said = str(_fault(monkeypatch, _build(monkeypatch, tmp_path / "file" / "cache")))
    assert "got NotADirectoryError: " in said and "set TRITON_CACHE_DIR to a folder that can be written to" in said


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_cache_that_the_system_refuses(monkeypatch, code):
    def refuse() -> None:
        raise OSError(code, "no", "/root/.triton")

    said = str(_fault(monkeypatch, refuse))
    assert "set TRITON_CACHE_DIR" in said and ("free some space" in said) == (code == errno.ENOSPC)


def test_a_module_that_cannot_be_loaded(monkeypatch):
    def load() -> None:
        raise ImportError("/c/launcher.so: failed to map segment from shared object")

    assert "set TRITON_CACHE_DIR to another folder" in str(_fault(monkeypatch, load))


def _compilation_error() -> Exception:
    from triton.compiler.errors import CompilationError

    return CompilationError("x = 1", None, "no such operation")  # type: ignore[arg-type]


def _out_of_resources() -> Exception:
    from triton.runtime.errors import OutOfResources

    return OutOfResources(300_000, 232_448, "shared memory")


def _ptxas() -> Exception:
    from triton.runtime.errors import PTXASError

    return PTXASError("ptxas fatal: Value 'sm_121a' is not defined " + 2000 * "x")


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (_compilation_error, "install the Triton that this PyTorch was released with"),
        (_out_of_resources, "report it with the output of `strobe env`"),
        (_ptxas, "TRITON_PTXAS_PATH"),
        (lambda: RuntimeError("PassManager::run failed"), "install the Triton that this PyTorch was released with"),
        (lambda: RuntimeError("Triton Error [CUDA]: invalid argument"), "report it"),
        (
            lambda: AttributeError("module 'triton' has no attribute 'gluon'"),
            "install the Triton that this PyTorch was released with",
        ),
        (lambda: subprocess.TimeoutExpired("gcc", 3), "report it"),
    ],
    ids=["CompilationError", "OutOfResources", "PTXASError", "passes", "CUDA", "other version", "subprocess"],
)
@pytest.mark.parametrize("target", ["A100", "H200"])
def test_what_triton_raises(monkeypatch, make, remedy, target):
    def fail() -> None:
        raise make()

    fault = _fault(monkeypatch, fail, target)
    assert f"got {type(fault.__cause__).__name__}: " in str(fault) and remedy in str(fault) and len(str(fault)) < 1500
    assert ('ask for kernel="portable"' in str(fault)) == (make is _out_of_resources and target == "H200")


def test_a_gpu_call_without_a_driver(monkeypatch):
    """From the public function through Triton itself, and of gradients too."""
    monkeypatch.setattr(ops.Target, "of", lambda device: FAKES["A100"])
    CACHE.clear()
    q = torch.zeros(1, 128, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(strobe.KernelFault, match=r"^portable\.forward \(block_m=.* on A100: got .* expected .*; "):
        strobe.attention(q, q, q, kernel="portable")
    leaf = q.requires_grad_()
    monkeypatch.setattr(PortableForward, "run", lambda self, plan, call, tensors, workspace: tensors.out.zero_())
    with pytest.raises(strobe.KernelFault, match=r"^portable\.backward \("):
        strobe.attention(leaf, leaf, leaf).sum().backward()


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), strobe.InvalidProblem("a", "b", "c", "d"), KeyboardInterrupt()],
)
def test_what_is_no_fault_of_a_kernel_is_left_alone(monkeypatch, error):
    def fail(*_: object) -> None:
        raise error

    q = torch.zeros(1, 128, 2, 64, dtype=torch.bfloat16)
    plan = select(Problem.from_call(Call(q, q, q)), FAKES["H200"]).forward
    monkeypatch.setattr(HopperForward, "run", fail)
    with pytest.raises(type(error)) as raised:
        ops._launch(plan, Call(q, q, q), None, {})
    assert raised.value is error


@pytest.mark.parametrize(
    "body", ["raise ImportError('libcupti.so: cannot open')", "raise OSError('GLIBC_2.34 not found')", ""]
)
def test_a_triton_that_does_not_import(tmp_path, body):
    """Another package of that name has no version; both are found as late as a GPU kernel is asked for."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(body)
    code = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
import torch, strobe
from strobe import Problem
from strobe.problem.call import Call
from strobe.problem.target import FAKES
from strobe.selection.select import select
q = torch.zeros(1, 8, 2, 64)
strobe.attention(q, q, q)
for target in ("A100", "H200"):
    try:
        select(Problem.from_call(Call(q.half(), q.half(), q.half())), FAKES[target])
    except strobe.KernelFault as fault:
        print(fault)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert len(lines) == 2 and all(line.startswith("import triton: got ") for line in lines)
    assert all("install the one this PyTorch was released with" in line for line in lines)


def test_a_triton_too_old_is_a_reason(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    protocol.no_triton.cache_clear()
    try:
        assert protocol.no_triton() == "needs Triton 3.6 or later; this is 3.5.1"
    finally:
        protocol.no_triton.cache_clear()


def test_what_is_made_ahead_in_a_thread_fails_in_silence(monkeypatch):
    from strobe.kernels.runtime import first_call_overlap

    said = []
    monkeypatch.setattr(threading, "excepthook", said.append)

    def fail(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(first_call_overlap, "_launcher", fail)
    monkeypatch.setattr(first_call_overlap, "_hashing", lambda: threading.current_thread() and _Done())
    with pytest.raises(ZeroDivisionError):
        first_call_overlap._with_launcher(lambda source: 1 / 0, object())
    assert not said


class _Done:
    def join(self) -> None: ...
