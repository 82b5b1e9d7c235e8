"""Verdicts on clusters: programs that send each other numbers, whose synchronisation is bent one piece at a time; `off`
names the piece.
"""

import pytest
import torch

from strobe.kernels.device.cluster import await_inbox, cluster_wait, inbox, open_inbox, received, send
from strobe.kernels.device.dialect import gl, gluon
from strobe.kernels.runtime import launcher
from strobe.sim import SimulationFault, simulate

PROGRAMS, PAIRS = gl.constexpr(4), gl.constexpr(32)
SIZE = gl.constexpr(2 * 32 * 4)  # 8 pairs from each program


@gluon.jit
def exchange_kernel(x, out, off: gl.constexpr):
    program = gl.program_id(0) % PROGRAMS
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [1, 1], [1, 0])
    pair = gl.arange(0, PAIRS, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, 2, gl.SliceLayout(0, layout))[None, :]
    box = inbox(SIZE)
    if off != "open":
        open_inbox(box, SIZE)
    if off != "wait":
        cluster_wait()  # @wait
    place = box + ((program * PAIRS // PROGRAMS + pair // PROGRAMS) * 2 + column) * 4
    reached = pair % PROGRAMS + column * 0 + (1 if off == "beyond" else 0)
    numbers = gl.load(x + (gl.program_id(0) * PAIRS + pair) * 2 + column)
    if off == "odd":
        place += 4
    if off != "silent" or program != 1:
        send(numbers, place, reached, box, pair >= 0, SIZE)  # @send
    if off != "await":
        await_inbox(box, SIZE)  # @await
    read = box + (pair * 2 + column) * 4
    if off == "far":
        read = gl.inline_asm_elementwise(
            "mapa.shared::cluster.u32 $0, $1, 1;", "=r,r", [read], dtype=gl.int32, is_pure=True, pack=1
        )
    gl.store(out + (gl.program_id(0) * PAIRS + pair) * 2 + column, received(read))  # @read


FEW = 2  # seeds: a run is of eight programs


def exchange(off="", clusters=2):
    x = torch.arange(clusters * 4 * 64).float().view(-1, 4, 8, 4, 2)  # [cluster, from, n, to, 2]
    out = torch.full_like(x, float("nan"))
    launcher.in_clusters(4, clusters, exchange_kernel, (x, out, off), {"num_warps": 1})
    return out.view(-1, 4, 4, 8, 2), x.permute(0, 3, 1, 2, 4)


def bent(verdict, off, *expected, sometimes=()):
    verdict(lambda: exchange(off), *expected, sometimes=sometimes, seeds=FEW)


def test_programs_of_a_cluster_get_what_they_were_sent(verdict):
    verdict(exchange, seeds=FEW)
    for mode in ("eager", "pct"):
        with simulate("sm_90", mode):
            got, sent = exchange()
        assert torch.equal(got, sent)


def test_a_program_may_not_have_begun(verdict):
    bent(
        verdict,
        "wait",
        ("race", "may not have started", "@send"),
        ("unfinished", "ends without having waited at its cluster's barrier"),
        sometimes=(
            ("barrier", "not initialised", "@send"),
            ("race", "without being ordered after its initialisation", "@send"),
            ("race", "which has ended", "@send"),
            ("bounds", "where no variable lies", "@send"),
            ("deadlock", "parity 0", "@await"),
            ("race", "reads what is written by", "@read"),
            ("uninitialised", "@read"),
        ),
    )


def test_numbers_are_read_before_they_came(verdict):
    bent(
        verdict,
        "await",
        ("unfinished", "ends without having waited for st.async"),
        sometimes=(
            ("race", "reads what is written by", "@read"),
            ("race", "overwrites what is read by", "@send"),
            ("uninitialised", "@read"),
            ("race", "which has ended", "@send"),
            ("bytes", "that were never copied"),
        ),
    )


def test_a_program_does_not_send(verdict):
    bent(verdict, "silent", ("deadlock", "parity 0", "@await"))


def test_a_program_beyond_the_cluster(verdict):
    bent(
        verdict, "beyond", ("bounds", "names program 4 of a cluster of 4", "@send"), ("deadlock", "parity 0", "@await")
    )


def test_numbers_at_an_address_that_is_no_multiple_of_theirs(verdict):
    bent(
        verdict,
        "odd",
        ("bounds", "not a multiple", "@send"),
        sometimes=(("uninitialised", "@read"), ("race", "@send"), ("race", "@read")),
    )


def test_numbers_of_another_program_are_read_as_its_own(verdict):
    bent(
        verdict,
        "far",
        ("bounds", "ld.shared::cluster", "@read"),
        sometimes=(
            ("race", "reads what is written by", "@read"),
            ("race", "which has ended", "@read"),
            ("uninitialised", "@read"),
            ("race", "overwrites what is read by", "@send"),
        ),
    )


def test_a_program_does_not_say_that_it_is_there(verdict):
    bent(verdict, "open", ("barrier", "without having arrived", "@wait"), ("race", "may not have started", "@send"),
            sometimes=(("barrier", "not initialised"), ("race", "without being ordered after its initialisation"),
                       ("race", "which has ended", "@send"), ("bounds", "where no variable lies", "@send"),
                       ("deadlock", "parity 0", "@await"), ("bytes",), ("uninitialised", "@read"), ("race", "@read"),
                       ("race", "@send")))  # fmt: skip


def test_without_a_cluster_a_program_is_alone():
    x = torch.zeros(64)
    with pytest.raises(SimulationFault, match="names program 1 of a cluster of 1"), simulate("sm_90"):
        exchange_kernel[(1,)](x, x.clone(), "", num_warps=1)


def test_a_cluster_is_of_the_constants_it_was_asked_for():
    """As Triton's: what was compiled for other constants runs as it did."""
    with simulate("sm_90", check=False) as run:
        exchange()
        assert not run.reports
        x = torch.zeros(64)
        exchange_kernel[(1,)](x, x.clone(), "await", num_warps=1)
    assert any("of a cluster of 1" in report.text for report in run.reports)
