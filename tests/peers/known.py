"""Failures of the peers' tests that are known: patterns of suite, test and message, and the cause."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple


class Known(NamedTuple):
    suite: str
    test: str
    message: str
    why: str

    def covers(self, suite: str, test: str, message: str) -> bool:
        return all(fnmatchcase(given, pattern) for given, pattern in zip((suite, test, message), self))


_CACHE = (
    "The test replaces or counts the entries of a cache of compiled kernels that FlashAttention-4's private "
    "functions hold. strobe's have none."
)
_SCHEDULER = (
    "The test asks for tensors in FlashAttention-4's scheduler metadata. strobe plans its launches itself "
    "and returns it without any."
)
_BACKWARD = (
    "The test passes `window_size` to `_flash_attn_backward` and unpacks four results; FlashAttention-3's "
    "takes none and returns one."
)

KNOWN: tuple[Known, ...] = (
    Known("fa4", "*", "AttributeError: * has no attribute 'compile_cache'", _CACHE),
    Known(
        "fa4", "*test_flash_attn_varlen_cumsum_metadata_paths", "AssertionError: assert None is not None*", _SCHEDULER
    ),
    Known(
        "fa4",
        "*test_flash_attn_lse_grad_unused",
        "AssertionError: dV should be identical since LSE doesn't depend on V*",
        "The test asks for the same bits of dV with and without a gradient of lse. On a CPU PyTorch's kernel "
        "computes one and strobe's the other; "
        "both are within the bounds, and the contract promises equal bits to equal calls.",
    ),
    Known(
        "fa4",
        "*test_flash_attn_invalid_head_dim",
        "Failed: DID NOT RAISE AssertionError",
        (
            "The test expects an error for head dimensions 4, 148 and 288, which FlashAttention-4 cannot run. strobe "
            "runs them (288 on a CPU alone)."
        ),
    ),
    Known(
        "fa3*",
        "*test_flash3_bw_compatibility",
        "AttributeError: '_OpNamespace' 'flash_attn_3' object has no attribute *",
        "The test reads the schemas of FlashAttention-3's C++ operators. The stand-in has its Python functions.",
    ),
    Known(
        "fa3",
        "test_attn_kvcache.py::*",
        "TypeError: flash_attn_with_kvcache() got an unexpected keyword argument 'gqa_parallel'",
        "The test passes an argument that FlashAttention-3's own function no longer has (`pack_gqa` today).",
    ),
    Known("fa3", "test_flash_attn_bwd_determinism.py::*", "*_flash_attn_backward*", _BACKWARD),
    Known(
        "fa3*",
        "test_flash_attn.py::*",
        "AssertionError: assert *e-0[6789] <= ((* * 0.0) + 0.0) *(d[qk] - d[qk]_ref)*",
        "Of rows that see one key dq and dk are exactly 0, and so is the bound of the test. On a CPU they come out "
        "below 1e-5, by the order of two "
        "float32 sums; those of PyTorch's attention do too.",
    ),
    Known(
        "fa2",
        "*test_flash_attn_varlen_paged_kv_num_splits",
        "Failed: DID NOT RAISE RuntimeError",
        "The test expects an error for `num_splits=2`. strobe plans its splits itself and takes the number as a hint.",
    ),
    Known(
        "fa2",
        "*test_flash_attn_generator_arg_must_be_none",
        "Failed: DID NOT RAISE RuntimeError",
        (
            "The test passes something else than None for dropout's generator, by position, and expects an error. "
            "strobe ignores it: its dropout takes a seed from torch's default generator."
        ),
    ),
    Known(
        "fa2",
        "*test_flash_attn_kvcache_paged_block_table_bounds",
        "Failed: DID NOT RAISE RuntimeError",
        "The test expects an error for lengths beyond a block table. strobe clamps them, writes nothing outside "
        "the pages and reports them in "
        "`strobe.last_errors()`, so that no call waits for the device.",
    ),
)
