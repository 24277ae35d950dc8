"""A worker with a keeper, and kept decodes that are begun there and left."""

from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from support.clients.worker_calls import WorkerCalls, decode_request
from support.cluster.processes import Process, keeper
from support.cluster.several_processes import until
from support.keeping import workers_of
from support.servers.etcd import free_port

from baton.calls import stream
from baton.engine.v1 import decode_pb2

SECRET, OWNER = b"s" * 16, sha256(b"owner").digest()
BEGUN = 5
"""The tokens after which a decode is left, at least."""

_ENGINE = "engine={kind: pytorch, model: models/demo, execution: fused, threads: 1, kv_cache_bytes: 16MiB}"


@dataclass(slots=True)
class KeptWorker:
    """A worker with a keeper."""

    process: Process
    metrics: str
    deaths: int = 0

    async def kill(self) -> None:
        """Kills the worker, and waits for its next process."""
        [child] = workers_of(self.process.popen.pid)
        child.kill()
        self.deaths += 1
        await until(self._is_back)

    def _is_back(self) -> bool:
        return self.process.log.read_text().count("worker was started again") == self.deaths


@contextmanager
def kept_worker(log: Path, *options: str) -> Iterator[KeptWorker]:
    """A worker on the demo checkpoint whose weights and KV outlive its process; it serves."""
    metrics = f"127.0.0.1:{free_port()}"
    kept = [_ENGINE, "registry.kind=memory", "keep_memory={weights: true, kv: true}", "drain_seconds=0"]
    with keeper("worker.yaml", [*kept, f"metrics_listen={metrics}", "worker_id=kept", *options], log) as started:
        started.wait_until_serving()
        yield KeptWorker(started, metrics)


def kept_request(name: str, tokens: int, grace: float = 60.0, **fields: Any) -> decode_pb2.DecodeRequest:
    """A seeded decode that is kept for `grace` seconds without a reader; `fields` are of its sampling."""
    request = decode_request(request_id=name, max_tokens=tokens)
    request.sampling.stop.ignore_eos = True
    request.sampling.params.temperature, request.sampling.params.seed = 0.9, 7
    for field, value in fields.items():
        setattr(request.sampling, field, value)
    request.keep.secret_sha256, request.keep.owner_sha256 = sha256(SECRET).digest(), OWNER
    request.keep.record, request.keep.hop = b"record", 3
    request.keep.grace.FromNanoseconds(int(grace * 1e9))
    return request


async def begin(calls: WorkerCalls, request: decode_pb2.DecodeRequest, seconds: float = 300.0) -> None:
    """Begins a decode, and leaves it after some tokens."""
    count = 0
    async with aclosing(stream(calls.decodes.Decode(request, timeout=seconds))) as responses:
        async for response in responses:
            count += len(response.tokens.token_ids)
            if count >= BEGUN:
                return


async def attach(
    calls: WorkerCalls, name: str, **fields: Any
) -> tuple[decode_pb2.DecodeAttached, list[int], decode_pb2.DecodeFinished]:
    """Reads a kept decode to its end."""
    asked = decode_pb2.AttachRequest(request_id=name, **{"secret": SECRET, "owner_sha256": OWNER, **fields})
    responses = [response async for response in stream(calls.decodes.Attach(asked, timeout=120))]
    ids = [token_id for response in responses for token_id in response.tokens.token_ids]
    return responses[0].attached, ids, responses[-1].finished
