"""Nothing is left of what has ended: no block, lease, call or task, and every table is as large as before."""

import asyncio
import gc
from collections import Counter, deque
from functools import cache
from itertools import pairwise
from typing import Any

from simulation.invariants.base import Invariant, calls_of, engine_of

_ROOMS = ("router.", "services.", "rpc.", "engine_protocol.", "baton_http2.", "discovery.")
# Tables that keep something on purpose, within a bound of their own: caches, estimates, answers for repeated calls.
_BOUNDED = {
    "LeaseTable._released", "Released",  # answers for repeated releases
    "Blocks", "BlockKeys", "KvIndex", "Cache", "ExpectedBlocks", "PromptHasher",
    "Ledger", "Tenant.served", "RankCosts._known", "Sequence",  # of prompts and tenants; the last batch of each engine
    "OptionChecks",  # options that were right, up to a number of them
    "KeptStreams._cancelled",  # answers that were cancelled by their handles, up to a number of them
    "Method", "WrapMethods._handlers",  # of each server, one for each method that was ever called
    "HpackDecoder._remembered", "Connection._ended_early",  # of a connection: its first header blocks, its last streams
}  # fmt: skip
_TABLES = (dict, list, set, deque)
# What grows need not leak: what is asked again may run at other workers, whose tables fill. A leak grows every time.
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 8
# Calls in the background come and go: the least of a few moments counts.
_MOMENTS, _MOMENT_SECONDS = 3, 0.37


class NothingIsLeft(Invariant):
    """A lease after the last request, nothing is held anywhere, and no router counts a request at a worker."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self._users: dict[tuple[str, str], int] = {}  # of the channels of routers: the least in quiet

    def look(self) -> None:
        if not self.world.is_quiet:
            self._users.clear()
            return
        for name, router in self.routers():
            for worker in router.cluster.workers:
                # One of an encode worker keeps the embeddings that are cached.
                users = worker._users - ("encode" in worker.record.roles)
                key = (name, worker.record.process)
                self._users[key] = min(users, self._users.get(key, users))

    def drained(self, node: Any) -> None:
        left = [task for task in node.tasks if not task.done()]
        if left and not node.paused and not node.dead and not self.world.chaos.disturbed(0.0, None, -1e9):
            self.problem(f"{node.name} has drained, and {len(left)} of its tasks run on: {left[0]!r:.300}")

    def end(self) -> None:
        for (name, process), users in self._users.items():
            if users > 0:
                self.problem(f"{name}: {users} users keep the channel to {process} open")
        for name, worker in self.workers():
            self._check_worker(name, worker)
        for name, router in self.routers():
            self._check_admission(name, router.path.admission)
            if len(router.requests):
                self.problem(f"{name}: {len(router.requests)} requests run on: {list(router.requests._running)[:3]}")
            for worker in router.cluster.workers:
                if worker.requests or worker.waiting_tokens:
                    counts = f"{worker.requests} requests and {worker.waiting_tokens} tokens"
                    self.problem(f"{name}: counts {counts} at {worker.record.worker_id}")

    def _check_admission(self, name: str, admission: Any) -> None:
        for (model, role), queue in admission._queues.items():
            if not queue.is_unused:
                self.problem(
                    f"{name}: {queue.running} requests of {model} have a place at {role}, {queue.waiting} wait"
                )
        for tenant, counts in admission.quotas._tenants.items():
            if counts.running:
                self.problem(f"{name}: counts {counts.running} running requests of {tenant}")

    def _check_worker(self, name: str, worker: Any) -> None:
        if len(worker.leases) and engine_of(worker) is not None:
            self.problem(f"{name}: {len(worker.leases)} leases outlive their length")
        if len(calls_of(worker)):
            self.problem(f"{name}: calls {list(calls_of(worker)._calls)[:3]}")
        if len(worker.kept):
            self.problem(f"{name}: {len(worker.kept)} kept answers outlive their grace")
        engine = engine_of(worker)
        if engine is None:
            return
        load = engine.load()
        if load.running or load.waiting or load.blocks_used:
            self.problem(f"{name}: {load.running} run, {load.waiting} wait, {load.blocks_used} blocks are used")
        if any(count for count in engine._held.values()):
            self.problem(f"{name}: blocks {list(engine._held)[:5]} are held")
        for rank in engine._ranks.all:
            if rank.blocks.used:
                self.problem(f"{name}: {rank.blocks.used} blocks of rank {rank.number} are used")


class TablesShrink(Invariant):
    """The same requests, sent again and again, do not make a table of any class larger each time, nor leave more
    objects of any class.
    """

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self._seen: list[Counter[str]] = []

    def end(self) -> None:
        if len(self._seen) < _LEAST_ROUNDS:
            return
        for table, grown in self._growing().items():
            self.problem(f"{table} has {', then '.join(map(str, grown))} entries more each time")

    def wants_round(self, number: int) -> bool:
        """True if something has grown each time so far, and may go on."""
        return number < _MOST_ROUNDS and bool(self._seen and self._growing())

    async def measure(self) -> None:
        """Counts the entries of all tables."""
        least: Counter[str] | None = None
        for _ in range(_MOMENTS):
            found = self._entries()
            least = (
                found if least is None else Counter({name: min(count, found[name]) for name, count in least.items()})
            )
            await asyncio.sleep(_MOMENT_SECONDS)
        assert least is not None
        self._seen.append(least)

    def _growing(self) -> dict[str, list[int]]:
        found = {}
        for table in sorted(self._seen[-1]):
            grown = [after[table] - before[table] for before, after in pairwise(self._seen)]
            if min(grown, default=1) > 0 and table not in _BOUNDED and table.partition(".")[0] not in _BOUNDED:
                found[table] = grown
        return found

    def _entries(self) -> Counter[str]:
        for node in self.world.nodes.values():
            node.forget_done()
        self.world.loop.forget_cancelled()
        return _entries()


def _entries() -> Counter[str]:
    """The numbers of entries in the tables of the product's objects, and of objects of each class."""
    gc.collect()
    found: Counter[str] = Counter()
    for one in gc.get_objects():
        kind = type(one)
        names = _names_of(kind)
        if names is None:
            continue
        found[kind.__name__] += 1
        for name, value in _attributes(one, names):
            if isinstance(value, _TABLES):
                found[f"{kind.__name__}.{name}"] += len(value)
    return found


@cache
def _names_of(kind: type) -> tuple[str, ...] | None:
    """The slots of a class of the product; None of another class."""
    if not str(kind.__module__).startswith(_ROOMS):
        return None
    slots = [each.__dict__.get("__slots__", ()) for each in kind.__mro__]
    return tuple(name for each in slots for name in ((each,) if isinstance(each, str) else each))


def _attributes(one: Any, slots: tuple[str, ...]) -> Any:
    yield from getattr(one, "__dict__", {}).items()
    for name in slots:
        value = getattr(one, name, None)
        if value is not None:
            yield name, value
