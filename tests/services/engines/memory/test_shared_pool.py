"""Runs of neighbouring blocks, and the gaps between them."""

from services.engines.memory.shared_pool import gaps, runs


def test_gaps_are_all_blocks_but_the_given_ones() -> None:
    assert gaps({7, 2, 3}, 10) == [(0, 2), (4, 3), (8, 2)]
    assert gaps({0, 9}, 10) == [(1, 8)]
    assert gaps([], 4) == [(0, 4)]
    assert gaps(range(4), 4) == []


def test_runs_are_neighbouring_blocks_in_the_given_order() -> None:
    assert runs([4, 5, 6, 2, 3, 9]) == [(4, 3), (2, 2), (9, 1)]
