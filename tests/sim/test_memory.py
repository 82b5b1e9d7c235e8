"""The shadow of memory: which accesses conflict, and what an access costs."""

import numpy as np
import pytest

from strobe.sim.memory import PAGE, Actor, Memory

ELEMENTS = 8 * PAGE


@pytest.fixture
def memory() -> Memory:
    return Memory("x", "global", np.zeros(4 * ELEMENTS, np.uint8), 4, initialised=True)


def access(memory: Memory, agent: str, offsets, write: bool) -> list[str]:
    """Record an access of four bytes at each offset; the agents whose accesses it conflicts with."""
    actor = Actor(agent, 1, {agent: 1}, "generic", "access", ())
    conflicts, unwritten = memory.touch(memory.mask_at(np.asarray(offsets), 4), write, actor)
    assert unwritten == 0
    return [one.actor.agent for one in conflicts]


def test_an_access_over_many_pages_conflicts_once_with_each(memory):
    everything = 4 * np.arange(ELEMENTS)
    assert access(memory, "a", everything, True) == []
    assert access(memory, "b", everything[10:-10], False) == ["a"]
    assert access(memory, "c", everything, True) == ["a", "b"]
    assert access(memory, "d", everything[::PAGE], False) == ["c"]


def test_far_apart_elements_meet_as_near_ones_do(memory):
    scattered = 4 * np.array([0, PAGE - 1, PAGE, 5 * PAGE, 7 * PAGE + 3])
    assert access(memory, "a", scattered, True) == []
    assert access(memory, "b", scattered + 4, False) == ["a"]  # PAGE - 1 + 1 is PAGE
    assert access(memory, "b", 4 * np.array([7 * PAGE + 2, 7 * PAGE + 4]), True) == ["b"]
    assert access(memory, "c", 4 * np.array([5 * PAGE]), True) == ["a"]


@pytest.mark.parametrize("offset, size", [(2, 4), (0, 8), (6, 1), (3, 2)])
def test_the_granules_of_unaligned_elements(memory, offset, size):
    mask = memory.mask_at(np.array([offset, offset + 4 * PAGE]), size)
    own = sum(1 << granule for granule in range(offset // 4, (offset + size - 1) // 4 + 1))
    assert mask == {0: own, 1: own}


def test_an_access_looks_only_at_its_own_pages(memory):
    """What other programs did elsewhere is not read: the records of each page are those of its own accesses."""
    for program in range(ELEMENTS // 1024):
        access(memory, f"{program}/main", 4 * np.arange(1024 * program, 1024 * (program + 1)), True)
    assert max(len(page.writes) for page in memory.pages.values()) == PAGE // 1024
    for program in range(100):
        access(memory, f"{program}/reader", [0], False)
    assert len(memory.pages[0].reads) == 100 and sum(len(page.reads) for page in memory.pages.values()) == 100
    assert access(memory, "last", [0], True) == ["0/main", *(f"{program}/reader" for program in range(100))]
