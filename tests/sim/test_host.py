"""Host code as users write it: autotuned kernels, device queries, tensors asked for on "cuda"."""

import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from torch.nn import functional

from strobe.sim import Checks, cuda_on_cpu, simulate
from strobe.sim.command import run as command


def first_that_fits(configs, named, **keywords):
    return [config for config in configs if config.kwargs["BLOCK"] <= named["n"]]


@triton.autotune(
    [triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in ((1024, 8), (64, 2), (32, 1))],
    key=["n"],
    prune_configs_by={"early_config_prune": first_that_fits},
    restore_value=["x"],
)
@triton.heuristics({"EVEN": lambda named: named["n"] % named["BLOCK"] == 0})
@triton.jit
def grown_kernel(x, blocks, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=EVEN | (at < n)) + 1, mask=EVEN | (at < n))
    tl.atomic_add(blocks + BLOCK // 32, 1)


@pytest.mark.parametrize("every, ran", [(False, [0, 0, 2]), (True, [0, 4, 2])])
def test_an_autotuned_kernel_runs_its_first_configuration_or_each(every, ran):
    """The first configuration is pruned. Each run but the last is undone, as the autotuner's hooks say."""
    x, blocks = torch.zeros(100), torch.zeros(40, dtype=torch.int32)
    with simulate("sm_90", checks=Checks(every_config=every)):
        grown_kernel[lambda named: (triton.cdiv(100, named["BLOCK"]),)](x, blocks, 100)
    assert torch.equal(x, torch.ones(100))
    assert blocks[[32, 1, 2]].tolist() == ([0, 0, 2] if not every else [0, 4, 2])
    assert grown_kernel.best_config.kwargs["BLOCK"] == (32 if every else 64)


def test_host_code_reads_the_targets_properties():
    with simulate("sm_100", sms=7):
        active = triton.runtime.driver.active
        properties = active.utils.get_device_properties(active.get_current_device())
        assert properties["multiprocessor_count"] == 7 and properties["max_shared_mem"] == 227 * 1024
        assert active.get_current_target().arch == 100
        assert torch.cuda.get_device_properties("cuda").multi_processor_count == 7
        assert torch.cuda.get_device_capability() == (10, 0) and torch.cuda.current_device() == 0
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(), end.record(), torch.cuda.synchronize()
        assert begin.elapsed_time(end) == 0.0


@triton.jit
def doubled_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


class Doubled(torch.autograd.Function):
    """As libraries write it: for CUDA alone."""

    @staticmethod
    def forward(ctx, x):
        assert x.is_cuda and x.device.type == "cuda"
        out = torch.empty_like(x)
        with torch.cuda.device(x.device):
            doubled_kernel[lambda named: (triton.cdiv(x.numel(), named["BLOCK"]),)](x, out, x.numel(), BLOCK=64)
        return out

    @staticmethod
    def backward(ctx, dout):
        dout, dx = dout.contiguous(), torch.full(dout.shape, torch.nan, device="cuda")
        doubled_kernel[(triton.cdiv(dout.numel(), 64),)](dout, dx, dout.numel(), BLOCK=64)
        return dx


def test_code_for_cuda_runs_unedited():
    with cuda_on_cpu("sm_90"), simulate("sm_90"):
        device = triton.runtime.driver.active.get_active_torch_device()
        x = torch.randn(100, device=device, requires_grad=True)
        out = Doubled.apply(x)
        out.sum().backward()
        torch.testing.assert_close(out.cpu(), 2 * x.detach().cpu())
        assert torch.cuda.is_available() and out.device == device
        assert torch.equal(x.grad, torch.full([100], 2.0, device="cuda"))
    assert not x.is_cuda and (torch.cuda.is_available() or x.device.type == "cpu")


def test_moves_between_devices_are_copies():
    with cuda_on_cpu():
        here = torch.zeros(4)
        there = [here.cuda(), here.to("cuda"), here.to(device="cuda:0"), here.to(torch.device("cuda"), torch.float64)]
        for copy in there:
            copy += 1
        assert here.tolist() == [0.0] * 4
        back = there[0].cpu()
        there[0] += 1
        assert back.tolist() == [1.0] * 4
        assert torch.arange(3, device="cuda").sum().item() == 3


def test_compiled_functions_run_eagerly():
    doubled = torch.compile(lambda x: x * 2)
    with cuda_on_cpu():
        assert doubled(torch.ones(4, device="cuda")).tolist() == [2.0] * 4


def test_benchmarks_run_once():
    calls = []
    with cuda_on_cpu():
        assert triton.testing.do_bench(lambda: calls.append(1), quantiles=[0.5, 0.2]) == [1.0, 1.0]
    assert calls == [1]


@triton.jit
def warmed_kernel(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), 1.0)


def test_a_warm_up_answers_for_the_resources_of_a_kernel():
    """The occupancy that Triton's softmax tutorial computes."""
    with simulate("sm_90"):
        kernel = warmed_kernel.warmup(torch.zeros(4), BLOCK=4, num_warps=8, grid=(1,))
        kernel._init_handles()
        limits = triton.runtime.driver.active.utils.get_device_properties(0)
        assert limits["max_num_regs"] // (kernel.n_regs * 32 * 8) > 0
        assert limits["max_shared_mem"] // kernel.metadata.shared > 0


def test_what_a_warm_up_returns_is_launched():
    """As Triton's softmax tutorial does, with all arguments in order."""
    x = torch.zeros(4)
    with simulate("sm_90"):
        kernel = warmed_kernel.warmup(x, BLOCK=4, grid=(1,))
        kernel[(1, 1, 1)](x, 4)
    assert x.tolist() == [1.0] * 4


def test_an_unknown_target_is_told():
    with pytest.raises(ValueError, match="target: got 'sm_7', expected one of sm_80"), cuda_on_cpu("sm_7"):
        pass


# ---------------------------------------------------------------- files that are written for a GPU

WRITTEN_FOR_CUDA = """
import torch, triton
import triton.language as tl

SMS = triton.runtime.driver.active.utils.get_device_properties(0)["multiprocessor_count"]
DEVICE = triton.runtime.driver.active.get_active_torch_device()

@triton.jit
def ticket_kernel(x, out, count, n, LAST: tl.constexpr):
    tl.store(out + tl.program_id(0), tl.load(x + tl.program_id(0)) + 1)
    if tl.atomic_add(count, 1, sem="acq_rel") == LAST:
        tl.store(out + n, tl.sum(tl.load(out + tl.arange(0, 4))))

def run(correct=True):
    assert DEVICE.type in ("cuda", "cpu")
    x = torch.arange(4.0, device=DEVICE)
    out = torch.full([5], float("nan"), device=DEVICE)
    ticket_kernel[(4,)](x, out, torch.zeros(1, dtype=torch.int32, device=DEVICE), 4 if correct else 5, LAST=3)
    return out

def test_sum():
    out = run()
    assert out.is_cuda and out[4].item() == 10

def test_fault():
    run(correct=False)
"""


def test_a_file_that_asks_for_the_device_at_import_runs_from_the_command_line(tmp_path, capsys):
    file = tmp_path / "written_for_cuda.py"
    file.write_text(WRITTEN_FOR_CUDA)
    assert command([f"{file}::run", "--mode", "pct", "--cuda"]) == 0
    sys.modules.pop("written_for_cuda")
    assert command([f"{file}::run", "--mutate"]) == 0
    assert "weaken order" in capsys.readouterr().out
    sys.modules.pop("written_for_cuda")


def test_a_test_file_that_is_written_for_a_gpu_runs_unedited(tmp_path):
    file = tmp_path / "test_for_cuda.py"
    file.write_text(WRITTEN_FOR_CUDA)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--simulate", "sm_90", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "bounds: global store leaves out (0 elements before its start, 1 past its end" in done.stdout


@triton.jit
def incremented_kernel(x, out, n, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at, mask=at < n, other=0) + 1)


def test_what_a_launch_returns_is_launched_again():
    """As libraries do that keep compiled kernels: with all arguments in order, constants too."""
    x, out = torch.zeros(8), torch.full([8], torch.nan)
    with simulate("sm_90"):
        compiled = incremented_kernel[(1,)](x, out, 8, SIZE=8, num_warps=1)
        compiled[(1,)](out, out, 8, 8)
    assert out.tolist() == [2.0] * 8 and compiled.metadata.num_warps == 1


@pytest.mark.parametrize("target, threads", [("sm_80", 2048), ("sm_86", 1536), ("sm_90", 2048), ("sm_120", 1536)])
def test_threads_of_a_multiprocessor(target, threads):
    with cuda_on_cpu(target):
        assert torch.cuda.get_device_properties(0).max_threads_per_multi_processor == threads


def test_tritons_binding_of_cublas_computes_on_the_cpu():
    """Tutorials create it where torch.cuda is available, to time it beside their kernels."""
    with cuda_on_cpu("sm_90"):
        from triton._C.libtriton import nvidia

        cublas = nvidia.cublas.CublasLt(torch.empty(32, dtype=torch.uint8, device="cuda"))
        a, b, c = (torch.randn(8, 8, dtype=torch.float16, device="cuda") for _ in range(3))
        product, total = torch.empty_like(c), torch.empty_like(c)
        cublas.matmul(a, b, product)
        cublas.gemm(a, b, c, total, 2.0, 0.5)
    expected = a.float() @ b.float().T
    assert torch.equal(product, expected.half())
    assert torch.equal(total, (2 * expected + 0.5 * c.float()).half())


def test_a_layer_norm_of_float16_adds_up_its_gradients_in_float32():
    """As on CUDA. torch's CPU adds the gradient of the weight in float16; Triton's tutorial compares with it."""
    with cuda_on_cpu("sm_90"):
        x, w, b = (torch.rand(shape, dtype=torch.float16, device="cuda") for shape in ((1024, 64), (64,), (64,)))
        given, exact = (
            [t.detach().to(dtype).requires_grad_() for t in (x, w, b)] for dtype in (x.dtype, torch.float64)
        )
        gradient = torch.rand_like(x)
        for leaves in (given, exact):
            functional.layer_norm(leaves[0], (64,), *leaves[1:], 1e-5).backward(gradient.to(leaves[0].dtype))
    largest = float(exact[2].grad.abs().max())
    assert given[1].grad.dtype == torch.float16
    for ours, theirs in zip(given, exact, strict=True):  # a rounding of the result, and the inputs' normalisation
        assert float((ours.grad - theirs.grad).abs().max()) <= 2 * torch.finfo(torch.float16).eps * largest


PRODUCTS = {
    "a @ b": lambda a, b: a @ b,
    "mm": torch.mm,
    "Tensor.matmul": lambda a, b: a.matmul(b),
    "matmul, out": lambda a, b: torch.matmul(a, b, out=torch.empty(len(a), b.shape[1], dtype=a.dtype)),
    "bmm": lambda a, b: torch.bmm(a[None], b[None])[0],
    "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b),
    "linear": lambda a, b: functional.linear(a, b.T),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_a_product_of_16_bits_is_rounded_once(product, dtype):
    """torch's CPU adds its terms in float32, and rounds about 1 of 700 elements otherwise. Triton's tutorials compare
    their kernels with it, and allow less than that."""
    draws = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=draws).to(dtype) for _ in range(2))
    exact = a.double() @ b.double()
    with cuda_on_cpu("sm_90"):
        given = a.detach().requires_grad_() if product is not PRODUCTS["matmul, out"] else a
        found = product(given, b)
        assert found.dtype == dtype and torch.equal(found, exact.to(dtype))
        if given.requires_grad:
            found.sum().backward()
            assert given.grad.dtype == dtype
