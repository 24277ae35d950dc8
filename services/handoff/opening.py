"""Opens the pools of the prefill workers that can hand over to this worker, before a request needs them."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial

import structlog

from baton.errors import BatonError, PermissionDenied, Unauthenticated
from discovery.backoff import Backoff
from discovery.pairing import can_hand_over
from discovery.record import WorkerRecord, steps_apart
from discovery.registry import Registry
from runtime.aio import TaskGroup, timeout
from runtime.lasting import lasting
from services.engines.kv import KvLayout
from services.handoff.peers import OwnerConnection, Peers
from services.handoff.remote_handoff import LeasedBlocks, without_lease
from services.transports.base import Transport

log = structlog.get_logger(__name__)

# An open pool takes address space and a connection. Those of further peers are opened by their first handoffs.
MOST_PEERS = 64
_OPEN_SECONDS = 10.0
# How much later a worker is ready, at most, for peers that do not answer.
START_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 60.0


class PoolOpener:
    """Keeps the pools of registered peers open.

    A peer that does not answer, or whose pool cannot be read, is tried again after growing pauses for as long as it is
    registered.
    """

    def __init__(self, peers: Peers, transports: Sequence[Transport], layout: KvLayout) -> None:
        self._peers = peers
        self._transports = transports
        self._layout = layout
        self._opening: dict[str, asyncio.Task[None]] = {}
        self._untried: set[str] = set()
        self._tried = asyncio.Event()

    @asynccontextmanager
    async def running(self, registry: Registry, record: WorkerRecord) -> AsyncIterator[None]:
        """Opens pools for the worker of this record while the context is open.

        Entering waits until each peer that is registered now has been tried, for START_SECONDS at most.
        """
        async with TaskGroup() as group:
            following = group.create_task(lasting("pools of peers", partial(self._follow, registry, record)))
            with suppress(TimeoutError):
                async with timeout(START_SECONDS):
                    await self._tried.wait()
            try:
                yield
            finally:
                following.cancel()

    async def _follow(self, registry: Registry, record: WorkerRecord) -> None:
        self._opening.clear()
        async with TaskGroup() as group, aclosing(registry.watch()) as views:
            try:
                async for records in views:
                    self._open_those_of(nearest_owners(record, records), group)
            except (Unauthenticated, PermissionDenied) as error:
                log.warning("peers are unknown, so their first handoffs open their pools", problem=error.message)

    def _open_those_of(self, owners: Iterable[WorkerRecord], group: TaskGroup) -> None:
        wanted = {owner.process: owner for owner in owners}
        for process in self._opening.keys() - wanted.keys():
            self._opening.pop(process).cancel()
            self._untried.discard(process)
        for process in wanted.keys() - self._opening.keys():
            self._untried.add(process)
            self._opening[process] = group.create_task(self._keep_open(wanted[process]))
        self._record_tried()

    async def _keep_open(self, owner: WorkerRecord) -> None:
        pool_of = without_lease(owner.worker_id, owner.epoch, owner.address)
        backoff = Backoff(max_seconds=_LONGEST_PAUSE_SECONDS)
        while True:
            async with self._peers.use(pool_of) as peer:
                is_open = await self._open(peer, pool_of)
                self._untried.discard(owner.process)
                self._record_tried()
                if is_open:
                    backoff.reset()
                    await peer.forgotten.wait()
            await asyncio.sleep(backoff.next_seconds())

    async def _open(self, peer: OwnerConnection, pool_of: LeasedBlocks) -> bool:
        try:
            async with timeout(_OPEN_SECONDS):
                await peer.pool(pool_of, self._transports, self._layout)
        except (BatonError, TimeoutError) as error:
            log.info("the pool of a peer is not open", owner=pool_of.worker_id, problem=str(error) or "no answer")
            return False
        return True

    def _record_tried(self) -> None:
        if not self._untried:
            self._tried.set()


def nearest_owners(reader: WorkerRecord, records: Iterable[WorkerRecord]) -> list[WorkerRecord]:
    """The workers whose KV the reader may be handed: MOST_PEERS of them at most, the nearest first."""
    owners = [record for record in records if _may_hand_over(record, reader)]
    return sorted(owners, key=partial(_order, reader))[:MOST_PEERS]


def _may_hand_over(owner: WorkerRecord, reader: WorkerRecord) -> bool:
    is_prefilling = "prefill" in owner.roles and owner.model == reader.model and not owner.draining
    return is_prefilling and can_hand_over(owner, reader)


def _order(reader: WorkerRecord, owner: WorkerRecord) -> tuple[int, int]:
    """Among those as near, each reader has another order, so that all owners are some readers' first."""
    own_order = zlib.crc32(f"{reader.worker_id} {owner.worker_id}".encode())
    return steps_apart(reader.known_location, owner.known_location), own_order
