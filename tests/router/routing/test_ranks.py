"""The data-parallel rank that a request runs on."""

from router.routing.scoring import Ranks


def test_a_worker_of_one_rank_is_left_alone() -> None:
    assert Ranks("w", 1).begin("") is None


def test_requests_are_spread_evenly_over_ranks() -> None:
    ranks = Ranks("w", 4)
    begun = [ranks.begin("") for _ in range(8)]
    assert sorted(rank for rank in begun if rank is not None) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_idlest_rank_is_chosen_once_a_request_has_ended() -> None:
    ranks = Ranks("w", 2)
    first, second = ranks.begin(""), ranks.begin("")
    assert {first, second} == {0, 1}
    assert second is not None
    ranks.end(second)
    assert ranks.begin("") == second


def test_a_session_stays_on_its_rank() -> None:
    ranks = Ranks("w", 8)
    assert len({_rank_of(ranks, "session") for _ in range(20)}) == 1


def test_a_session_leaves_a_rank_that_is_too_busy() -> None:
    ranks = Ranks("w", 2)
    begun = [ranks.begin("session") for _ in range(4)]
    assert begun[0] == begun[1] == begun[2] != begun[3]


def test_sessions_are_spread_over_ranks() -> None:
    ranks = Ranks("w", 4)
    assert {_rank_of(ranks, f"session {number}") for number in range(64)} == {0, 1, 2, 3}


def _rank_of(ranks: Ranks, session_key: str) -> int:
    rank = ranks.begin(session_key)
    assert rank is not None
    ranks.end(rank)
    return rank
