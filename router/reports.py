"""Models and workers as clients and operators see them."""

from baton.inference.v1 import cluster_service_pb2, model_pb2
from google.protobuf.duration_pb2 import Duration

from router.cluster import Cluster
from router.model import ServedModel
from router.worker import Worker

_STATES = {
    "ready": cluster_service_pb2.WORKER_STATE_READY,
    "unhealthy": cluster_service_pb2.WORKER_STATE_UNHEALTHY,
    "draining": cluster_service_pb2.WORKER_STATE_DRAINING,
}


def model(served: ServedModel, cluster: Cluster) -> model_pb2.Model:
    """A model, with the workers that are ready for it."""
    ready = [worker for worker in cluster.workers if worker.record.model == served.name and not worker.problem]
    return model_pb2.Model(
        name=served.name,
        limits=served.limits,
        capabilities=served.capabilities,
        prefill_workers=_count(ready, "prefill"),
        decode_workers=_count(ready, "decode"),
        encode_workers=_count(ready, "encode"),
    )


def worker(seen: Worker) -> cluster_service_pb2.Worker:
    """A worker, as this router sees it now."""
    record = seen.record
    age = Duration()
    age.FromNanoseconds(int(seen.load_age_seconds * 1e9))
    return cluster_service_pb2.Worker(
        worker_id=record.worker_id,
        address=record.address,
        roles=record.roles,
        model=record.model,
        state=_STATES[seen.state],
        engine=record.engine,
        layout_digest=record.layout_digest,
        epoch=record.epoch,
        load=seen.load,
        load_age=age,
    )


def _count(workers: list[Worker], role: str) -> int:
    return sum(role in worker.record.roles for worker in workers)
