"""Which workers are eligible is remembered, until one of them changes."""

from dataclasses import dataclass, field, replace

from support.cluster.in_process import PATIENT, bench, simulated

from baton.inference.v1 import cluster_service_pb2
from discovery.record import WorkerRecord
from router.routing.filters import EligibleWorkers
from router.routing.policy import KnownLoras


@dataclass
class Known:
    """A worker as filters see it."""

    record: WorkerRecord
    problem: str = ""
    embedding_layout: str = ""
    encoder: str = ""
    loras: KnownLoras = field(default_factory=KnownLoras)
    requests: int = 0
    waiting_tokens: int = 0
    others_tokens: int = 0
    wake_seconds: float = 0.0
    token_seconds: float | None = None
    load: cluster_service_pb2.WorkerLoad = field(default_factory=cluster_service_pb2.WorkerLoad)


@dataclass
class Workers:
    """Workers, and the number of changes so far."""

    workers: list[Known]
    version: int = 0


def worker(worker_id: str, role: str = "decode", context: int = 100) -> Known:
    return Known(WorkerRecord(worker_id, 1, "x:1", (role,), "m", "e", "a" * 64, context))


def names(found: tuple[Known, ...]) -> list[str]:
    return [each.record.worker_id for each in found]


def test_they_are_found_anew_when_a_worker_has_changed() -> None:
    cluster, eligible = Workers([worker("a"), worker("b"), worker("p", "prefill")]), EligibleWorkers[Known]()
    first = eligible.find(cluster, "decode", "m", 10, "")
    assert names(first) == ["a", "b"]
    assert eligible.find(cluster, "decode", "m", 20, "") is first
    assert names(eligible.find(cluster, "prefill", "m", 10, "")) == ["p"]
    cluster.workers[0].problem, cluster.version = "it hangs", 1
    assert names(eligible.find(cluster, "decode", "m", 10, "")) == ["b"]
    cluster.workers[1].record, cluster.version = replace(cluster.workers[1].record, draining=True), 2
    assert eligible.find(cluster, "decode", "m", 10, "") == ()


def test_requests_differ_in_context_model_and_layout_of_embeddings() -> None:
    cluster, eligible = Workers([worker("short", context=50), worker("long")]), EligibleWorkers[Known]()
    cluster.workers[1].embedding_layout = "x"
    for _ in range(2):
        assert names(eligible.find(cluster, "decode", "m", 50, "")) == ["short", "long"]
        assert names(eligible.find(cluster, "decode", "m", 51, "")) == ["long"]
        assert names(eligible.find(cluster, "decode", "m", 101, "")) == []
        assert names(eligible.find(cluster, "decode", "m", 50, "x")) == ["long"]
        assert names(eligible.find(cluster, "decode", "other", 50, "")) == []


async def test_a_cluster_has_another_version_after_each_change_of_its_workers() -> None:
    async with bench(simulated("a", "decode"), simulated("b", "decode"), router=PATIENT) as running:
        cluster = running.cluster
        before = cluster.version
        cluster.workers[0].health.mark_unhealthy("it does not answer")
        assert cluster.version != before
        before = cluster.version
        await running.stop("b")
        await running.ready(1)
        assert cluster.version != before
