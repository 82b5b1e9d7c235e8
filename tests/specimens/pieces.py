"""What the specimens share: a position in a ring, barriers, launches, descriptors, checks of arguments."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from strobe.kernels.device.dialect import TensorDescriptor, gl, gluon, mbarrier

DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}
LOG2_E = 1.4426950408889634


@gluon.jit
def init_barriers(barriers, count: gl.constexpr):
    number: gl.constexpr = barriers.shape[0]
    for i in gl.static_range(number):
        mbarrier.init(barriers.index(i), count=count)


class Launch(NamedTuple):
    """One kernel, its grid, its arguments, Triton's options, and the outputs it fills."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple
    options: dict[str, int]
    outputs: tuple[Tensor, ...]

    def start(self) -> tuple[Tensor, ...]:
        self.kernel[self.grid](*self.arguments, **self.options)
        return self.outputs


def descriptor(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """TMA's view of a tensor, moved in tiles of shape `block`; rows beyond its end arrive as zeros and are not
    written."""
    return TensorDescriptor.from_tensor(
        tensor, block, gl.NVMMASharedLayout.get_default_for(block, DTYPES[tensor.dtype])
    )


def rows(tensor: Tensor) -> Tensor:
    """[B, S, H, D] as a matrix [B * S, H * D]: a head is a band of columns."""
    return tensor.view(tensor.shape[0] * tensor.shape[1], -1)


def nans(*shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype or like.dtype, device=like.device)


def require(holds: bool, name: str, got: Any, expected: str, remedy: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {got}; expected {expected}: {remedy}")


def require_power_of_two(config: Any, **least: int) -> None:
    """Each named field of a config is a power of two and at least the number given."""
    for name, smallest in least.items():
        value = getattr(config, name)
        fits = value >= smallest and value & (value - 1) == 0
        require(
            fits, name, value, f"a power of two from {smallest} on", "choose one; Gluon's tiles have no other sizes"
        )


def require_shared(config: Any, kib: int) -> None:
    """A config's shared memory fits in what a CTA of its GPU can have."""
    taken, limit = config.shared_bytes(), kib * 1024
    require(taken <= limit, "shared memory", taken, f"at most {limit} bytes", "take fewer stages or smaller blocks")


def require_16_bit(**tensors: Tensor) -> None:
    """The tensors have one dtype, float16 or bfloat16."""
    (first, other), *_ = tensors.items()
    for name, tensor in tensors.items():
        dtype = tensor.dtype
        require(dtype in (torch.float16, torch.bfloat16), f"{name}.dtype", dtype, "float16 or bfloat16", "convert it")
        require(dtype == other.dtype, f"{name}.dtype", dtype, f"{first}'s {other.dtype}", "convert one")


def require_matrices(a: Tensor, b: Tensor) -> None:
    """a [M, K] and b [K, N], 16-bit, as TMA and cp.async take them: rows contiguous and 16 bytes apart or a multiple of
    that.
    """
    fit = a.ndim == 2 and b.ndim == 2 and a.shape[1] == b.shape[0]
    require(fit, "shapes of a, b", (tuple(a.shape), tuple(b.shape)), "[M, K] and [K, N]", "transpose one")
    require_16_bit(a=a, b=b)
    for name, tensor in (("a", a), ("b", b)):
        require(tensor.numel() > 0, f"{name}.shape", tuple(tensor.shape), "no empty dimension", "skip the call")
        aligned = tensor.stride(1) == 1 and tensor.stride(0) % 8 == 0 and tensor.data_ptr() % 16 == 0
        expected = "(a multiple of 8, 1) from an address divisible by 16"
        require(aligned, f"{name}.stride()", tensor.stride(), expected, "take a view of padded rows")


def empty_product(a: Tensor, b: Tensor) -> Tensor:
    """NaNs [M, N] for a @ b, a view of rows padded to 16 bytes."""
    m, n = a.shape[0], b.shape[1]
    return nans(m, (n + 7) // 8 * 8, like=a)[:, :n]


def require_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    """q [B, S_q, H, D], k and v [B, S_k, H_kv, D], contiguous, 16-bit."""
    require(q.ndim == 4 and k.ndim == 4, "q.ndim, k.ndim", (q.ndim, k.ndim), "4: [B, S, H, D]", "reshape them")
    require(k.shape == v.shape, "v.shape", tuple(v.shape), f"k's {tuple(k.shape)}", "give one value for each key")
    same = (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
    require(
        same,
        "k.shape",
        tuple(k.shape),
        f"q's B {q.shape[0]} and D {q.shape[3]}",
        "give one batch entry of keys for each of queries",
    )
    require(
        q.shape[2] % k.shape[2] == 0,
        "H, H_kv",
        (q.shape[2], k.shape[2]),
        "H a multiple of H_kv",
        "repeat the heads of k and v",
    )
    require(
        not causal or q.shape[1] == k.shape[1],
        "S_q, S_k",
        (q.shape[1], k.shape[1]),
        "equal ones when causal",
        "pad the shorter",
    )
    require_16_bit(q=q, k=k, v=v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require(
            tensor.is_contiguous(),
            f"{name}.stride()",
            tensor.stride(),
            "a contiguous tensor",
            f"pass {name}.contiguous()",
        )


def require_multiple(name: str, value: int, block: int) -> None:
    require(
        value > 0 and value % block == 0,
        name,
        value,
        f"a positive multiple of {block}",
        "pad it, or choose a smaller block",
    )
