"""Every specimen compiles for its GPU without one: its tensor core instruction is there, nothing spills, no wgmma is
serialised.
"""

import re

import pytest
import torch

pytest.importorskip("triton")

from strobe.problem.target import FAKES
from tests.specimens import ampere, backward, blackwell, forward, matmul
from tools.proof.compile import report

PLACES = {"UTCMMA": "B200", "HGMMA": "H200", "HMMA": "A100"}  # product instruction -> a GPU that has it


def matrices():
    return torch.zeros(256, 512, dtype=torch.bfloat16), torch.zeros(512, 256, dtype=torch.bfloat16)


def heads(head_dim: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(1, 512, 2, head_dim, dtype=dtype)


def forward_launch(dtype: torch.dtype = torch.bfloat16, **options) -> forward.Launch:
    config = forward.Config(**options)
    q = heads(config.head_dim, dtype)
    return forward.launch(q, q, q, config, programs=2 if config.persistent else 0)


def backward_launch(**options) -> forward.Launch:
    config = backward.Config(**options)
    q = heads(config.head_dim)
    return backward.launch(backward.Saved(q, q, q, q, torch.zeros(1, 2, 512), q), config)


def attention_launch(head_dim: int, block_n: int) -> forward.Launch:
    q = heads(head_dim)
    return blackwell.launch_attention(q, q, q, blackwell.Attention(head_dim, block_n))


ROWS = {
    "matmul": ("HGMMA", lambda: matmul.launch(*matrices())),
    "matmul eight warps": ("HGMMA", lambda: matmul.launch(*matrices(), matmul.Config(256, 128, 64, 3, 8))),
    "forward d128 dense float16": ("HGMMA", lambda: forward_launch(torch.float16)),
    "forward d128 causal ping-pong persistent": (
        "HGMMA",
        lambda: forward_launch(causal=True, ping_pong=True, persistent=True),
    ),
    "forward d64 block 64": ("HGMMA", lambda: forward_launch(head_dim=64, block_n=64, stages=4, causal=True)),
    "backward d128 tma": ("HGMMA", lambda: backward_launch()),
    "backward d128 causal red": ("HGMMA", lambda: backward_launch(causal=True, dq="red")),
    "backward d128 causal ordered": ("HGMMA", lambda: backward_launch(causal=True, dq="ordered")),
    "ampere": ("HMMA", lambda: ampere.launch(*matrices())),
    "blackwell matmul": ("UTCMMA", lambda: blackwell.launch_matmul(*matrices())),
    "blackwell attention d64": ("UTCMMA", lambda: attention_launch(64, 128)),
    "blackwell attention d128": ("UTCMMA", lambda: attention_launch(128, 128)),
}


# one for each kind of kernel and instruction at each commit: specimens hardly change
EACH_COMMIT = {
    "matmul",
    "forward d128 causal ping-pong persistent",
    "backward d128 causal ordered",
    "ampere",
    "blackwell attention d64",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in EACH_COMMIT else [pytest.mark.nightly]) for name in ROWS]
)
def test_compiles_within_budget(name):
    product, make = ROWS[name]
    place = FAKES[PLACES[product]]
    launch = make()
    r = report(name, launch.kernel, place.capability, launch.arguments, launch.options)
    assert r.instructions.get(product, 0) > 0, r
    assert r.spill_bytes == 0, r
    assert not r.serialized, r
    assert 0 < r.registers <= 255, r
    config = launch.arguments[-1]
    assert config.shared_bytes() <= r.shared_bytes <= min(place.shared_bytes, config.shared_bytes() + 1024), (
        r
    )  # and barriers


def test_sizes_that_do_not_fit_are_refused():
    q = heads(64)
    wrong = {
        "S_q": lambda: forward.launch(q[:, :500].contiguous(), q, q, forward.Config(64)),
        "S_k": lambda: forward.launch(q, q[:, :500].contiguous(), q[:, :500].contiguous(), forward.Config(64)),
        "S_q, S_k": lambda: forward.launch(
            q, q[:, :256].contiguous(), q[:, :256].contiguous(), forward.Config(64, causal=True)
        ),
        "head_dim": lambda: forward.Config(head_dim=256),
        "programs": lambda: forward.launch(q, q, q, forward.Config(64, persistent=True)),
        "dq": lambda: backward.Config(dq="atomics"),
        "a.dtype": lambda: matmul.launch(*(t.float() for t in matrices())),
        "b.stride()": lambda: matmul.launch(matrices()[0], matrices()[0].t()),
        "shapes of a, b": lambda: matmul.launch(matrices()[0], matrices()[0]),
        "stages": lambda: matmul.Config(stages=1),
        "shared memory": lambda: matmul.Config(256, 256, 64, 4, 8),
        "K": lambda: ampere.launch(
            torch.zeros(8, 16, dtype=torch.bfloat16)[:, :9], torch.zeros(9, 8, dtype=torch.bfloat16)
        ),
        "head_dim + block_n": lambda: blackwell.Attention(256, 128),
    }
    for name, call in wrong.items():
        with pytest.raises(ValueError, match=f"^{re.escape(name)} is .*; expected .*: "):
            call()
