"""Operations on adapters (LoRA): listed, loaded and unloaded on all workers of a model at once."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from baton.calls import unary
from baton.engine.v1 import worker_pb2
from baton.errors import BatonError, InvalidRequest, NoWorker, Unsupported
from baton.inference.v1 import lora_pb2
from discovery.record import LORA
from router.routing.policy import KnownLoras
from router.workers.cluster import Cluster
from router.workers.handle import WorkerHandle

_DEFAULT_SECONDS = 60.0  # for callers that set no deadline
_LIST_SECONDS = 10.0
# A call of one worker, with its timeout; the answer has an `inventory`.
_Call = Callable[[WorkerHandle, float], Any]


@dataclass(frozen=True, slots=True)
class LoraChange:
    """The adapter to load or unload, and where: on these workers, or on all of the model."""

    name: str
    model: str
    worker_ids: Sequence[str]


def read_change(request: lora_pb2.LoadLoraRequest | lora_pb2.UnloadLoraRequest) -> LoraChange:
    """Reads a request. Raises InvalidRequest if it names no adapter."""
    if not request.name:
        raise InvalidRequest.of("name", "is empty")
    return LoraChange(request.name, request.model, tuple(request.worker_ids))


class LoraOperations:
    """Calls the workers that serve adapters. What they answer holds for requests from then on."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def report(self, model: str, seconds: float | None) -> list[lora_pb2.WorkerLoras]:
        """The adapters of each worker. Raises ModelNotFound, InvalidRequest, NoWorker and Unsupported."""
        return await self._call_each(
            self._workers(model),
            lambda worker, limit: worker.control.ListLoras(worker_pb2.ListLorasRequest(), timeout=limit),
            min(_LIST_SECONDS, seconds or _LIST_SECONDS),
        )

    async def load(self, change: LoraChange, seconds: float | None) -> list[lora_pb2.WorkerLoras]:
        """Loads an adapter. If no worker could, raises the error of one."""
        request = worker_pb2.LoadLoraRequest(name=change.name)
        return await self._change(change, lambda one, limit: one.control.LoadLora(request, timeout=limit), seconds)

    async def unload(self, change: LoraChange, seconds: float | None) -> list[lora_pb2.WorkerLoras]:
        """Unloads an adapter, and waits for the requests that use it. If no worker could, raises the error of one."""
        request = worker_pb2.UnloadLoraRequest(name=change.name)
        return await self._change(change, lambda one, limit: one.control.UnloadLora(request, timeout=limit), seconds)

    async def _change(self, change: LoraChange, call: _Call, seconds: float | None) -> list[lora_pb2.WorkerLoras]:
        workers = self._workers(change.model, change.worker_ids)
        return await self._call_each(workers, call, seconds or _DEFAULT_SECONDS)

    def _workers(self, model: str, worker_ids: Sequence[str] = ()) -> list[WorkerHandle]:
        name = self._cluster.model(model).name
        serving = [worker for worker in self._cluster.workers if worker.record.model == name]
        serving = [worker for worker in serving if LORA in worker.record.capabilities]
        if not serving:
            raise Unsupported(f"{name} does not support lora: none of its workers serves adapters")
        by_id = {worker.record.worker_id: worker for worker in serving}
        for index, worker_id in enumerate(worker_ids):
            if worker_id not in by_id:
                raise InvalidRequest.of(f"worker_ids[{index}]", f"no worker {worker_id[:80]!r} of {name} has adapters")
        chosen = [by_id[worker_id] for worker_id in worker_ids] or serving
        ready = [worker for worker in chosen if not worker.problem]
        if not ready:
            raise NoWorker(f"no worker of {name} is ready")
        return sorted(ready, key=lambda worker: worker.record.worker_id)

    async def _call_each(
        self, workers: Sequence[WorkerHandle], call: _Call, seconds: float
    ) -> list[lora_pb2.WorkerLoras]:
        answers = await asyncio.gather(*(self._call(worker, call, seconds) for worker in workers))
        if all(isinstance(answer, BatonError) for answer in answers):
            error = answers[0]
            assert isinstance(error, BatonError)
            raise error
        return [_message(worker, answer) for worker, answer in zip(workers, answers, strict=True)]

    async def _call(self, worker: WorkerHandle, call: _Call, seconds: float) -> lora_pb2.LoraInventory | BatonError:
        try:
            with worker.keep_open():
                answer = await unary(call(worker, seconds))
            worker.set_loras(KnownLoras.of(answer.inventory))
        except BatonError as error:
            error.worker_id = error.worker_id or worker.record.worker_id
            return error
        inventory: lora_pb2.LoraInventory = answer.inventory
        return inventory


def _message(worker: WorkerHandle, answer: lora_pb2.LoraInventory | BatonError) -> lora_pb2.WorkerLoras:
    found = lora_pb2.WorkerLoras(worker_id=worker.record.worker_id)
    if isinstance(answer, BatonError):
        found.problem = answer.message
    else:
        found.inventory.CopyFrom(answer)
    return found
