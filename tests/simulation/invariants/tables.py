"""Nothing is left of what has ended: no block, lease, call or task, and every table is as large as before."""

import gc
from collections import Counter, deque
from itertools import pairwise
from typing import Any

from simulation.invariants.base import Invariant, calls_of, engine_of

_ROOMS = ("router.", "services.", "rpc.", "engine_protocol.", "baton_http2.", "discovery.")
# Tables that keep something on purpose, within a bound of their own: caches, estimates, answers for repeated calls.
_BOUNDED = {
    "LeaseTable._released", "Released",  # answers for repeated releases
    "Blocks", "BlockKeys", "KvIndex", "Cache", "ExpectedBlocks", "PromptHasher",
    "Ledger", "Tenant.served", "RankCosts._known", "Sequence",  # of prompts and tenants; the last batch of each engine
}  # fmt: skip
_TABLES = (dict, list, set, deque)
# By how many entries one may grow each time: what is asked again need not run at the same workers.
_SLACK = 5


class NothingIsLeft(Invariant):
    """A lease after the last request, nothing is held anywhere, and no router counts a request at a worker."""

    def drained(self, node: Any) -> None:
        left = [task for task in node.tasks if not task.done()]
        if left and not node.paused and not node.dead and not self.world.chaos.disturbed(0.0, None, -1e9):
            self.problem(f"{node.name} has drained, and {len(left)} of its tasks run on: {left[0]!r:.300}")

    def end(self) -> None:
        for name, worker in self.workers():
            self._check_worker(name, worker)
        for name, router in self.routers():
            if len(router.requests):
                self.problem(f"{name}: {len(router.requests)} requests run on: {list(router.requests._running)[:3]}")
            for worker in router.cluster.workers:
                if worker.requests or worker.waiting_tokens:
                    counts = f"{worker.requests} requests and {worker.waiting_tokens} tokens"
                    self.problem(f"{name}: counts {counts} at {worker.record.worker_id}")

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

    def repeated(self) -> None:
        self._seen.append(self._entries())

    def end(self) -> None:
        if not self._seen:
            return
        self.repeated()
        for table in sorted(self._seen[-1]):
            grown = [after[table] - before[table] for before, after in pairwise(self._seen)]
            if min(grown) > _SLACK and table not in _BOUNDED and table.partition(".")[0] not in _BOUNDED:
                self.problem(f"{table} has {', then '.join(map(str, grown))} entries more each time")

    def _entries(self) -> Counter[str]:
        for node in self.world.nodes.values():
            node.forget_done()
        self.world.loop.forget_cancelled()
        return _entries()


def _entries() -> Counter[str]:
    """How many entries the tables of the product's objects have, and how many objects of each class there are."""
    gc.collect()
    found: Counter[str] = Counter()
    for one in gc.get_objects():
        kind = type(one)
        if not str(kind.__module__).startswith(_ROOMS):
            continue
        found[kind.__name__] += 1
        for name, value in _attributes(one):
            if type(value) in _TABLES or isinstance(value, _TABLES):
                found[f"{kind.__name__}.{name}"] += len(value)
    return found


def _attributes(one: Any) -> Any:
    yield from getattr(one, "__dict__", {}).items()
    for kind in type(one).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            value = getattr(one, name, None)
            if value is not None:
                yield name, value
