"""Adapters (LoRA) on the workers as this router sees them, and the names by which requests ask for them."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing
from typing import Any, Protocol

import structlog

from baton.calls import stream
from baton.engine.v1 import worker_pb2, worker_pb2_grpc
from baton.errors import BatonError, InvalidReply, InvalidRequest, NoWorker, Unsupported
from baton.inference.v1 import lora_pb2
from discovery.backoff import Backoff
from discovery.record import LORA
from discovery.registry import WorkerRecord
from router.routing.policy import KnownLoras
from router.telemetry import metrics
from router.text.served_model import ServedModel

log = structlog.get_logger(__name__)

SEPARATOR = ":"
_SHOWN = 80  # characters of a name in an error
_NAMED = 10  # adapters in an error
_LONGEST_NAME = 2048  # of a model and its adapter: each separator in it is a way to read it
_LONGEST_PAUSE_SECONDS = 10.0
# A worker that has told nothing for so long has no adapters, as far as names are concerned that no other one has.
TELLING_SECONDS = 10.0


class LoraWorker(Protocol):
    """The part of a worker that this module looks at."""

    @property
    def record(self) -> WorkerRecord: ...

    @property
    def loras(self) -> KnownLoras: ...

    @property
    def problem(self) -> str:
        """The reason that it cannot be used now; empty if it is ready."""


async def watch_loras(
    worker_id: str, control: worker_pb2_grpc.WorkerServiceStub, note: Callable[[KnownLoras], None]
) -> None:
    """Follows the adapters that a worker reports, until cancelled. While it cannot be reached they count as before; a
    report that is too large, or a first one that does not come, counts as none.
    """

    def ignore(problem: str) -> None:
        metrics.WORKER_FAULTS.labels("loras").inc()
        log.warning("the adapters that a worker reports are ignored", worker_id=worker_id, problem=problem)
        note(KnownLoras(is_reported=True))

    backoff = Backoff(max_seconds=_LONGEST_PAUSE_SECONDS)
    late = asyncio.get_running_loop().call_later(TELLING_SECONDS, ignore, f"none within {TELLING_SECONDS:g} s")
    try:
        while True:
            try:
                call: Any = control.WatchLoras(worker_pb2.WatchLorasRequest())
                async with aclosing(stream(call)) as responses:
                    async for response in responses:
                        note(KnownLoras.of(response.inventory))
                        late.cancel()
                        backoff.reset()
            except InvalidReply as error:
                late.cancel()
                ignore(error.message)
            except BatonError:
                # The health checks decide whether the worker is used.
                pass
            await asyncio.sleep(backoff.next_seconds())
    finally:
        late.cancel()


def find_lora(workers: Iterable[LoraWorker], model: ServedModel, name: str) -> lora_pb2.LoraAdapter:
    """The adapter that this name stands for now: of several contents, the one that most decode workers have loaded.

    Raises Unsupported if no worker of the model serves adapters, InvalidRequest if none has this one, and NoWorker if
    one has not told yet.
    """
    of_model = [worker for worker in workers if worker.record.model == model.name]
    serving = [worker for worker in of_model if LORA in worker.record.capabilities]
    if not serving:
        raise Unsupported(f"{model.name} does not support lora; it supports {model.abilities}")
    contents = _contents(serving, name)
    if contents:
        return contents[0]
    if not all(worker.loras.is_reported for worker in serving):
        raise NoWorker(f"some workers of {model.name} have not reported their adapters yet")
    text = f"no worker of {model.name} has the adapter {name[:_SHOWN]!r}; known are {_known(serving)}"
    raise InvalidRequest.of("lora_name", text)


def has_lora(workers: Iterable[LoraWorker], model: str, name: str) -> bool:
    """True if a worker of the model has an adapter of this name."""
    of_model = (worker for worker in workers if worker.record.model == model)
    return any(adapter.name == name for worker in of_model for adapter in worker.loras.adapters)


def loras_of_model(workers: Iterable[LoraWorker], model: str) -> dict[str, lora_pb2.LoraAdapter]:
    """All adapters of a model, by name, each with the content that `find_lora` takes."""
    by_name: defaultdict[str, list[tuple[LoraWorker, lora_pb2.LoraAdapter]]] = defaultdict(list)
    for worker in workers:
        if worker.record.model == model:
            for adapter in worker.loras.adapters:
                by_name[adapter.name].append((worker, adapter))
    return {name: _by_votes(by_name[name])[0] for name in sorted(by_name)}


def split_name(name: str) -> Iterator[tuple[str, str]]:
    """Each way to read a name as `<model>:<adapter>`; of one that is longer than any, none."""
    for index, character in enumerate(name if len(name) <= _LONGEST_NAME else ""):
        if character == SEPARATOR and 0 < index < len(name) - 1:
            yield name[:index], name[index + 1 :]


def named(model: str, adapter: lora_pb2.LoraAdapter | None) -> str:
    """The name of a model, or of one of its adapters as a model."""
    return f"{model}{SEPARATOR}{adapter.name}" if adapter else model


def _known(workers: Iterable[LoraWorker]) -> str:
    names = sorted({adapter.name for worker in workers for adapter in worker.loras.adapters})
    shown = ", ".join(name[:_SHOWN] for name in names[:_NAMED]) or "none"
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown


def _contents(workers: Iterable[LoraWorker], name: str) -> list[lora_pb2.LoraAdapter]:
    """The contents of this name, the one to take first."""
    return _by_votes([(worker, one) for worker in workers for one in worker.loras.adapters if one.name == name])


def _by_votes(held: Iterable[tuple[LoraWorker, lora_pb2.LoraAdapter]]) -> list[lora_pb2.LoraAdapter]:
    found: dict[str, lora_pb2.LoraAdapter] = {}
    votes: Counter[str] = Counter()
    for worker, adapter in held:
        weight = 1 + 1000 * ("decode" in worker.record.roles and not worker.problem)
        found[adapter.digest] = adapter
        votes[adapter.digest] += weight * (1000 if worker.loras.has_loaded(adapter) else 1)
    return [found[digest] for digest in sorted(found, key=lambda digest: (-votes[digest], digest))]
