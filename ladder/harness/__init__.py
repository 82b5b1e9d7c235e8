"""Runs, checks, measures and plots the rungs."""

from typing import Any

Row = dict[str, Any]  # one measured run, as JSON: field -> value

# name of a rung -> its file in ladder/, in the order of the course
FILES = {
    "k1": "k1_naive",
    "k2": "k2_tiled_softmax",
    "t": "triton_tiled",
    "a": "ampere_mma",
    "k3_1": "k3_tma_1_stage",
    "k3_2": "k3_tma_2_stages",
    "k3_3": "k3_tma_5_stages",
    "k4_1": "k4_wgmma",
    "k4_2": "k4_wgmma_registers",
    "k5": "k5_warp_specialized",
    "k6": "k6_pingpong",
    "k6_2": "k6_pingpong_optimistic",
    "decode": "flash_decode",
    "k7": "k7_fp8",
    "k8": "k8_fp8_hadamard",
}
RUNGS = tuple(FILES)
