"""Cycles of a step of the Blackwell decode, counted from the kernel's operands in the simulator."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")

from tools.proof.blackwell_decode_cycles import KEYS, MMA_SYNC_FLOPS, READ_BYTES, WIDTH, counted, main, step


@pytest.mark.parametrize("rows, bits", [(8, 16), (32, 16), (64, 16), (16, 8), (64, 8)])
def test_a_step_is_what_the_layouts_say(rows, bits):
    """K and V are copied and loaded once. P is stored once and loaded by four warps, and so is Q at 64 rows."""
    one = counted(5, rows, bits).less(counted(4, rows, bits))
    tiles, weights = 2 * KEYS * WIDTH * bits // 8, 2 * KEYS * rows
    assert one.flops == 2 * 2 * rows * KEYS * WIDTH and one.copied == tiles
    assert one.stored == weights
    assert one.loaded == tiles + 4 * weights + (4 * 2 * rows * WIDTH if rows == 64 else 0)


def test_reads_bind_up_to_32_rows_and_shared_memory_at_64():
    assert pytest.approx(28.9, abs=0.3) == READ_BYTES and MMA_SYNC_FLOPS == 2048
    found = {(rows, bits): step(rows, bits) for rows in (32, 64) for bits in (16, 8)}
    assert [one.share for one in found.values()] == [
        1.0,
        1.0,
        pytest.approx(0.837, abs=0.01),
        pytest.approx(0.517, abs=0.01),
    ]
    assert found[32, 8].tcgen05_share < 0.65 and found[64, 16].tcgen05_share == 1.0


def test_the_command_prints_a_table_or_objects(capsys):
    assert main(["--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["bits"], row["rows"]) for row in rows] == [(bits, n) for bits in (16, 8) for n in (8, 16, 32, 64)]
    assert main([]) == 0
    assert "| 16 | 64 | 1,125 | 1,024 | 1,344 | 84% | 512 | 768 | 100% |" in capsys.readouterr().out
