"""The registered workers of a namespace, each one watched from its first record until it leaves."""

import asyncio
import hashlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import structlog

from baton.engine.v1 import worker_pb2
from baton.errors import EngineFailed
from discovery.backoff import Backoff
from discovery.record import LORA
from discovery.registry import WorkerRecord
from router.text.served_model import ServedModel
from router.workers.handle import LoadCard, WorkerHandle
from runtime.aio import TaskGroup
from runtime.clock import monotonic

log = structlog.get_logger(__name__)

_CARD_SECONDS = 60.0  # a vocabulary of 250,000 tokens takes 2 s
# For so long a worker of the first view may leave names uncertain: it has 30 s to send its card, and reading that 60 s.
_TELLING_SECONDS = 90.0
_LONGEST_REASON = 300  # characters of what a card's reading raised
# Of more records those that are known are watched, and the first others.
_MOST_WORKERS = 4096

# Connects to a worker while the context is open; its card is read by the function.
Connect: TypeAlias = Callable[[WorkerRecord, LoadCard], AbstractAsyncContextManager[WorkerHandle]]


@dataclass(slots=True, eq=False)
class _Member:
    """A worker of one epoch, from its first record until it leaves."""

    record: WorkerRecord
    worker: WorkerHandle | None = None
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    since: float = field(default_factory=monotonic)

    def is_untold(self, models: Collection[str]) -> bool:
        """True while its model, or if it is one of `models` its adapters, are not known and may be soon."""
        worker = self.worker
        if monotonic() >= self.since + _TELLING_SECONDS:
            return False
        if worker is None or worker.health.awaits_card:
            return not self.leave.is_set()
        tells_loras = self.record.model in models and LORA in self.record.capabilities
        return tells_loras and not (worker.loras.is_reported or worker.problem)


class Members:
    """Watches every registered worker. `changed` is called after one has left.

    Errors of one worker do not affect the others.
    """

    def __init__(self, group: TaskGroup, connect: Connect, changed: Callable[[], None]) -> None:
        self._group = group
        self._connect = connect
        self._changed = changed
        self._members: dict[tuple[str, int, str], _Member] = {}
        self._first: frozenset[tuple[str, int, str]] | None = None  # the members of the first view of the registry
        self._turns = asyncio.Lock()  # to begin to watch a worker, one after the other
        self.connected = 0  # how many have been, in all
        self._cards: dict[str, tuple[bytes, asyncio.Future[ServedModel]]] = {}

    @property
    def is_known(self) -> bool:
        """True once the registry has been read."""
        return self._first is not None

    @property
    def workers(self) -> tuple[WorkerHandle, ...]:
        """Every worker that is watched, ready or not."""
        return tuple([member.worker for member in self._members.values() if member.worker])

    @property
    def records(self) -> list[WorkerRecord]:
        """The records of those that do not leave."""
        return [member.record for member in self._members.values() if not member.leave.is_set()]

    def untold(self, models: Collection[str]) -> str:
        """The id of a worker of the first view that may still tell that it serves one of these; empty for none."""
        for key in self._first or ():
            if (member := self._members.get(key)) and member.is_untold(models):
                return key[0]
        return ""

    def update(self, records: Sequence[WorkerRecord]) -> None:
        """Follows a view of the registry."""
        if len(records) > _MOST_WORKERS:
            log.error("too many workers are registered", workers=len(records), watched=_MOST_WORKERS)
            records = sorted(records, key=lambda record: _key(record) not in self._members)[:_MOST_WORKERS]
        seen = {_key(record): record for record in records}
        if self._first is None:
            self._first = frozenset(seen)
        for key, member in self._members.items():
            if key in seen:
                # What is kept for each rank is as of the first record: a process does not change how many it has.
                member.record = replace(seen[key], data_parallel_ranks=member.record.data_parallel_ranks)
                if member.worker is not None:
                    member.worker.record = member.record
            else:
                member.leave.set()
        for key, record in seen.items():
            known = self._members.get(key)
            # One that leaves has calls that still run, and may be back before they end.
            if known is None or known.leave.is_set():
                member = self._members[key] = _Member(record)
                self._group.create_task(self._host(key, member))

    def close(self) -> None:
        """Stops watching all workers."""
        for member in self._members.values():
            member.leave.set()

    async def _host(self, key: tuple[str, int, str], member: _Member) -> None:
        """Watches a worker until it leaves."""
        backoff = Backoff()
        while self._members.get(key) is member:
            watching = asyncio.ensure_future(self._watch(key, member))
            try:
                await asyncio.wait([watching])
            finally:
                watching.cancel()
            if watching.cancelled() or watching.exception() is None:
                continue
            error = watching.exception()
            self._first = (self._first or frozenset()) - {key}
            log.error("worker cannot be watched", worker_id=member.record.worker_id, exc_info=error)
            if member.worker is not None:
                member.worker.health.mark_unhealthy(f"it cannot be watched: {_reason(error)}")
            if member.leave.is_set():
                self._forget(key, member)
                return
            await asyncio.sleep(backoff.next_seconds())

    async def _watch(self, key: tuple[str, int, str], member: _Member) -> None:
        async with self._turns:
            await asyncio.sleep(0)
        async with self._connect(member.record, self._load_card) as worker:
            member.worker = worker
            self.connected += 1
            await member.leave.wait()
            log.info("worker left", worker_id=member.record.worker_id, problem=worker.problem)
            self._forget(key, member)

    def _forget(self, key: tuple[str, int, str], member: _Member) -> None:
        if self._members.get(key) is member:
            del self._members[key]
        self._changed()

    def _load_card(self, card: worker_pb2.ModelCard) -> "asyncio.Future[ServedModel]":
        """Loads the model of a card. Workers with equal cards share it."""
        digest = hashlib.sha256(card.SerializeToString(deterministic=True)).digest()
        known, future = self._cards.get(card.name, (b"", None))
        if future is None or known != digest:
            future = asyncio.ensure_future(_read(card))
            self._cards[card.name] = (digest, future)
        return asyncio.shield(future)


async def _read(card: worker_pb2.ModelCard) -> ServedModel:
    """Reads a card in a thread of its own, so that a slow one delays neither other cards nor requests.

    Raises EngineFailed for every error, since a card is untrusted data.
    """
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="card")
    reading = asyncio.get_running_loop().run_in_executor(thread, ServedModel.from_card, card)
    thread.shutdown(wait=False)
    done, _ = await asyncio.wait([reading], timeout=_CARD_SECONDS)
    if not done:
        raise EngineFailed(f"the card of {card.name} cannot be used: it was not read within {_CARD_SECONDS:g} s")
    if (error := reading.exception()) is not None:
        raise EngineFailed(f"the card of {card.name} cannot be used: {_reason(error)}") from error
    return reading.result()


def _reason(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"[:_LONGEST_REASON]


def _key(record: WorkerRecord) -> tuple[str, int, str]:
    return (record.worker_id, record.epoch, record.address)
