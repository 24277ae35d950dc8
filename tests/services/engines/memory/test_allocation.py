"""Which waiting request gets free blocks next."""

from collections import deque
from dataclasses import dataclass

import pytest

from services.engines.memory.allocation import MAX_PASSES, AllocationRules, Grant, KeptBlocks, grant_blocks


@dataclass
class Waiting:
    name: str
    found: Grant = Grant.GRANTED
    reserves: bool = False
    passed: int = 0


def taken(*items: Waiting) -> str:
    """Returns the requests that take blocks, in the order of the offers."""
    names: list[str] = []

    def offer(item: Waiting) -> Grant:
        if item.found is Grant.GRANTED:
            names.append(item.name)
        return item.found

    grant_blocks(deque(items), offer)
    return "".join(names)


@pytest.mark.parametrize("found", [Grant.POOL_FULL, Grant.HELD, Grant.LATER])
def test_a_request_that_fits_passes_one_that_does_not(found: Grant) -> None:
    assert taken(Waiting("a", found), Waiting("b"), Waiting("c")) == "bc"


def test_one_that_was_passed_too_often_is_passed_no_more() -> None:
    large = Waiting("a", Grant.POOL_FULL)
    for _ in range(MAX_PASSES):
        assert taken(large, Waiting("b")) == "b"
    assert taken(large, Waiting("b")) == taken(large, Waiting("b", reserves=True)) == ""


def test_reservations_pass_one_that_waits_for_other_workers_however_often() -> None:
    large = Waiting("a", Grant.HELD, passed=MAX_PASSES)
    assert taken(large, Waiting("b"), Waiting("c", reserves=True)) == "c"


def test_one_that_takes_room_leaves_the_queue() -> None:
    queue = deque([Waiting("a", Grant.HELD), Waiting("b")])
    grant_blocks(queue, lambda item: item.found)
    assert [item.name for item in queue] == ["a"]


def test_held_kv_takes_its_share_of_the_pool_and_no_more() -> None:
    kept = KeptBlocks(10, AllocationRules(held_share=0.5))
    kept.add([0, 1, 2])
    assert kept.may_add([], 2)
    assert not kept.may_add([], 3)


def test_one_prompt_may_be_held_whatever_its_size() -> None:
    assert KeptBlocks(10, AllocationRules(held_share=0.5)).may_add([], 9)


def test_blocks_that_held_prompts_share_are_counted_once() -> None:
    kept = KeptBlocks(10, AllocationRules(held_share=0.5))
    kept.add([0, 1, 2])
    assert kept.may_add([0, 1, 2], 2)
    kept.add([0, 1, 2, 3, 4])
    kept.remove([0, 1, 2])
    assert kept.beside([]) == 5


def test_a_request_fits_beside_held_kv_or_waits_for_other_workers() -> None:
    kept = KeptBlocks(10, AllocationRules())
    kept.add(range(6))
    assert kept.fits_beside_kept([], 4)
    assert not kept.fits_beside_kept([], 5)
    assert kept.fits_beside_kept([0, 1], 4)
