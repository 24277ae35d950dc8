"""The data-parallel rank that a request runs on."""

from contextlib import ExitStack

from router.routing.scoring import Ranks


def test_a_worker_of_one_rank_is_left_alone() -> None:
    with Ranks("w", 1).taking("") as rank:
        assert rank is None


def test_requests_are_spread_evenly_over_ranks() -> None:
    ranks = Ranks("w", 4)
    with ExitStack() as stack:
        taken = [stack.enter_context(ranks.taking("")) for _ in range(8)]
    assert sorted(rank for rank in taken if rank is not None) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_idlest_rank_is_taken_once_a_request_has_ended() -> None:
    ranks = Ranks("w", 2)
    with ranks.taking("") as first:
        with ranks.taking("") as second:
            assert {first, second} == {0, 1}
        with ranks.taking("") as third:
            assert third == second


def test_a_session_stays_on_its_rank() -> None:
    ranks = Ranks("w", 8)
    assert len({_taken(ranks, "session") for _ in range(20)}) == 1


def test_a_session_leaves_a_rank_that_is_too_busy() -> None:
    ranks = Ranks("w", 2)
    with ExitStack() as stack:
        taken = [stack.enter_context(ranks.taking("session")) for _ in range(4)]
    assert taken[0] == taken[1] == taken[2] != taken[3]


def test_sessions_are_spread_over_ranks() -> None:
    ranks = Ranks("w", 4)
    assert {_taken(ranks, f"session {number}") for number in range(64)} == {0, 1, 2, 3}


def _taken(ranks: Ranks, session_key: str) -> int | None:
    with ranks.taking(session_key) as rank:
        return rank
