"""Filter, score, pick."""

from dataclasses import dataclass, field, replace

import pytest

from baton.inference.v1 import cluster_service_pb2
from discovery.record import WorkerRecord
from router.routing.filters import Constraints, Rejected, filter_workers
from router.routing.policy import KnownLoras
from router.routing.retry import RetryBudget
from router.routing.scoring import Preferences, pick, score_workers, slowness


@dataclass(frozen=True)
class Seen:
    """A worker as the policy sees it."""

    record: WorkerRecord
    problem: str = ""
    requests: int = 0
    waiting_tokens: int = 0
    embedding_layout: str = ""
    encoder: str = ""
    token_seconds: float | None = None
    others_tokens: int = 0
    wake_seconds: float = 0.0
    loras: KnownLoras = field(default_factory=KnownLoras)
    load: cluster_service_pb2.WorkerLoad = field(default_factory=cluster_service_pb2.WorkerLoad)


def worker(
    worker_id: str,
    requests: int = 0,
    waiting_tokens: int = 0,
    problem: str = "",
    media: tuple[str, str] = ("", ""),
    **record: object,
) -> Seen:
    defaults = {"roles": ("decode",), "model": "m", "layout_digest": "a" * 64, "max_context_tokens": 100}
    fields = {"epoch": 1, "address": "x:1", "engine": "simulated", **defaults, **record}
    return Seen(WorkerRecord(worker_id=worker_id, **fields), problem, requests, waiting_tokens, *media)  # type: ignore[arg-type]


def picked(workers: list[Seen], preferences: Preferences) -> int:
    """The position of the worker that is picked."""
    return workers.index(pick(score_workers(workers, preferences), preferences))


def picked_id(workers: list[Seen], preferences: Preferences) -> str:
    return workers[picked(workers, preferences)].record.worker_id


def test_each_worker_left_out_has_its_reason() -> None:
    workers = [
        worker("able"),
        worker("other-model", model="n"),
        worker("other-role", roles=("prefill",)),
        worker("leaving", draining=True),
        worker("sick", problem="its health check failed"),
        worker("tried"),
        worker("other-layout", layout_digest="b" * 64, layout="(int8)"),
        worker("small", max_context_tokens=49),
    ]
    need = Constraints(
        "decode", "m", 50, layout_digest="a" * 64, layout="aaaaaaaaaaaa (int4)", tried=frozenset({"tried@1"})
    )
    filtered = filter_workers(workers, need)
    assert filtered.eligible == (workers[0],)
    assert filtered.rejected == (
        Rejected("other-model", "serves n"),
        Rejected("other-role", "has no decode role"),
        Rejected("leaving", "is draining"),
        Rejected("sick", "its health check failed"),
        Rejected("tried", "has failed this request"),
        Rejected("other-layout", "its KV layout, bbbbbbbbbbbb (int8), differs from aaaaaaaaaaaa (int4)"),
        Rejected("small", "its context ends at 49 tokens"),
    )


def test_a_worker_for_media_has_the_right_embeddings_and_if_need_be_no_other_role() -> None:
    workers = [
        worker("able", roles=("encode",), media=("l" * 20, "f" * 20)),
        worker("other-layout", roles=("encode",), media=("m" * 20, "f" * 20)),
        worker("blind", roles=("encode",)),
        worker("other-encoder", roles=("encode",), media=("l" * 20, "g" * 20)),
        worker("busy", roles=("encode", "decode"), media=("l" * 20, "f" * 20)),
    ]
    need = Constraints("encode", "m", 0, embedding_layout="l" * 20, encoder="f" * 20, is_dedicated=True)
    filtered = filter_workers(workers, need)
    assert filtered.eligible == (workers[0],)
    assert filtered.rejected == (
        Rejected("other-layout", "its embedding layout, mmmmmmmmmmmm, differs from llllllllllll"),
        Rejected("blind", "its embedding layout, none, differs from llllllllllll"),
        Rejected("other-encoder", "its encoder, gggggggggggg, differs from ffffffffffff"),
        Rejected("busy", "has the encode role beside decode only, which the configuration does not allow"),
    )


def test_the_least_busy_is_picked() -> None:
    assert picked([worker("a", 3), worker("b", 1), worker("c", 2)], Preferences(10)) == 1


def test_waiting_prompt_tokens_count_as_requests_of_this_length() -> None:
    long_prompt, short_prompt = Preferences(1000), Preferences(10)
    workers = [worker("a", requests=2), worker("b", waiting_tokens=1000)]
    assert picked(workers, long_prompt) == 1
    assert picked(workers, short_prompt) == 0


def test_equals_take_turns() -> None:
    workers = [worker("a"), worker("b"), worker("c", 5)]
    assert [picked(workers, Preferences(1, turn=turn)) for turn in range(4)] == [0, 1, 0, 1]


def test_a_session_has_a_worker_of_its_own_that_survives_changes_of_the_others() -> None:
    workers = [worker(name) for name in "abcdef"]
    homes = {key: picked_id(workers, Preferences(1, key)) for key in map(str, range(40))}
    assert len(set(homes.values())) > 3
    fewer = workers[:-1]
    for key, home in homes.items():
        if home != "f":
            assert picked_id(fewer, Preferences(1, key)) == home


def test_a_session_leaves_a_worker_that_is_too_busy() -> None:
    workers = [worker(name) for name in "ab"]
    own = picked(workers, Preferences(1, "key", slack=5))
    busy = [worker(name, requests=6 if index == own else 0) for index, name in enumerate("ab")]
    assert picked(busy, Preferences(1, "key", slack=5)) == 1 - own


def test_a_worker_that_decodes_slowly_gets_little() -> None:
    quick, slow = replace(worker("quick"), token_seconds=0.02), replace(worker("slow"), token_seconds=0.1)
    assert picked([replace(quick, requests=4), slow], Preferences(100)) == 0
    assert picked([replace(quick, requests=6), slow], Preferences(100)) == 1


def test_a_session_does_not_stay_with_a_worker_that_has_become_slow() -> None:
    workers = [replace(worker(f"w{index}"), token_seconds=0.02) for index in range(4)]
    own = picked(workers, Preferences(100, session_key="me", slack=8))
    workers[own] = replace(workers[own], token_seconds=0.1)
    assert picked(workers, Preferences(100, session_key="me", slack=8)) != own


@pytest.mark.parametrize(
    "seconds",
    [
        (0.02, 0.05),  # as batches differ
        (0.0001, 0.004),  # too small to notice
        (None, 0.1),  # there is nothing to compare it with
        (None, None),
    ],
)
def test_small_differences_in_speed_do_not_count(seconds: tuple[float | None, float | None]) -> None:
    workers = [replace(worker(str(index)), token_seconds=each) for index, each in enumerate(seconds)]
    assert slowness(workers) == [1, 1]


def test_a_retry_budget_ends_and_is_earned_by_requests() -> None:
    budget = RetryBudget(ratio=0.5, floor=2)
    assert [budget.take() for _ in range(3)] == [True, True, False]
    for _ in range(2):
        budget.earn()
    assert [budget.take() for _ in range(2)] == [True, False]


def test_two_workers_without_a_common_transport_are_not_paired() -> None:
    workers = [
        worker("far", offers=("shm",)),
        worker("nowhere", offers=()),
        worker("near", offers=("cuda_ipc", "tcp")),
        worker("older", offers=None),
    ]
    need = Constraints("decode", "m", 0)
    filtered = filter_workers(workers, replace(need, reads=("nixl", "tcp")))
    assert filtered.eligible == tuple(workers[2:])
    assert filtered.rejected == (
        Rejected("far", "has no transport in common with the decode worker: it offers shm, and read are nixl, tcp"),
        Rejected(
            "nowhere", "has no transport in common with the decode worker: it offers none, and read are nixl, tcp"
        ),
    )
    assert filter_workers(workers, need).eligible == tuple(workers)


@pytest.mark.parametrize(("requests", "chosen"), [(7, "awake"), (9, "asleep")])
def test_a_model_that_sleeps_is_chosen_once_the_others_are_much_busier(requests: int, chosen: str) -> None:
    workers = [worker("awake", requests=requests), replace(worker("asleep"), wake_seconds=0.2)]
    assert {picked_id(workers, Preferences(prompt_tokens=10, turn=turn)) for turn in range(4)} == {chosen}
