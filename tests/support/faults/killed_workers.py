"""Workers with keepers that are killed again and again under kept streams, alone or together with a router.

As a program it is a worker of this kind: `python -m support.faults.killed_workers CONFIG key=value...`.
"""

import asyncio
import math
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Literal

import psutil
from support.clients.scraping import Scrape, scrape
from support.cluster.fleet import Fleet, FleetPlan, Node
from support.cluster.forked_keeper import ForkedKeeper
from support.faults.lost_routers import Streams
from support.keeping import workers_of

from baton.calls import unary
from baton.inference.v1 import cluster_service_pb2
from services.keeper import keeper

KEPT = "keep_memory={weights: true, kv: true, hang_seconds: 3}"
ROUTER = (
    "probe={interval_seconds: 0.3, timeout_seconds: 3, hung_seconds: 6}",
    "retry={wait_seconds: 120, reattach_seconds: 30, max_attempts: 20}",
    "drain_seconds=1",
)
DEATHS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP)
Shape = Literal["one", "apart", "images"]
"""One worker for all; one for prompts and one for decodes; or these and one for images."""

_READY_SECONDS = 120.0
# Of so many kills, one is followed by another one while the next process starts, within so many seconds.
_SECOND_DEATHS, _START_SECONDS = 6, 3.0
_TWO_AT_ONCE, _UPGRADES = 4, 5  # one in so many times


@dataclass(slots=True)
class Kills:
    """The processes that were killed, and what those that followed have found."""

    kills: int = 0
    routers: int = 0
    stopped: int = 0
    by_keeper: int = 0
    upgrades: int = 0
    killed: dict[str, int] = field(default_factory=dict)
    recovered: dict[str, float] = field(default_factory=dict)

    def add(self, other: "Kills") -> None:
        """Adds those of another run."""
        self.kills += other.kills
        self.routers += other.routers
        self.stopped += other.stopped
        self.by_keeper += other.by_keeper
        self.upgrades += other.upgrades
        for mine, more in ((self.killed, other.killed), (self.recovered, other.recovered)):
            mine.update({name: mine.get(name, 0) + more.get(name, 0) for name in {*mine, *more}})

    def __str__(self) -> str:
        found = ", ".join(f"{count:.0f} {outcome}" for outcome, count in sorted(self.recovered.items()))
        killed = ", ".join(f"{count} {name}" for name, count in sorted(self.killed.items()))
        with_routers = f" ({self.routers} together with a router)" if self.routers else ""
        hangs = f"{self.upgrades} upgrades, {self.stopped} stopped, {self.by_keeper} killed by their keepers"
        return f"{self.kills} kills of workers{with_routers}: {killed}; {hangs}; decodes found {found}"


_ENGINE = "kind: pytorch, model: models/demo, name: demo, device: cpu, threads: 1, kv_cache_bytes: 16MiB"
_WORKER = ("handoff.lease_seconds=2", "drain_seconds=1")
_MODULE = "support.faults.killed_workers"


def plan(namespace: str, etcd: str, shape: Shape) -> FleetPlan:
    """The workers of a shape, and two routers."""
    # Images are for transformers' modules.
    execution = "library" if shape == "images" else "fused"
    worker = (f"engine={{{_ENGINE}, execution: {execution}}}", *_WORKER)
    if shape == "one":
        worker = (*worker, "roles=[prefill, decode]")
    # A new request for images is refused while no encoder is ready: there are two.
    return FleetPlan(
        namespace,
        etcd,
        worker,
        ROUTER,
        encode=2 * int(shape == "images"),
        prefill=int(shape != "one"),
        decode=1,
        routers=2,
        module=_MODULE,
        metrics=True,
    )


class Killer:
    """Kills the workers of a fleet, each at a random moment while streams run."""

    def __init__(self, running: Fleet, streams: Streams, seed: int = 0) -> None:
        self._running, self._streams = running, streams
        self._chosen = random.Random(seed)
        self.report = Kills()

    async def kill(
        self, times: int, *, routers: bool, seconds: float = math.inf, upgrades: int | None = _UPGRADES
    ) -> None:
        """Kills so many workers, for so long at most; sometimes two at once, every third time a router too.

        Once in so many times a worker is upgraded instead; never if that is None.
        """
        nodes = [node for node in self._running.nodes.values() if node.role == "router"]
        workers, ends_at = self._running.workers, time.monotonic() + seconds
        number = 0
        while self.report.kills < times and time.monotonic() < ends_at:
            await asyncio.sleep(self._chosen.uniform(0.1, 1.2))
            several = len(workers) > 1 and self._chosen.randrange(_TWO_AT_ONCE) == 0
            victims = [workers[(number + index) % len(workers)] for index in range(1 + several)]
            router = nodes[number % 2] if routers and number % 3 == 0 else None
            if router is not None:
                self.report.routers += 1
                router.kill()
                router.start()
            may_upgrade = upgrades and victims[0].role == "decode" and not several and not router
            if may_upgrade and not self._chosen.randrange(upgrades or 1):
                await self._upgrade(victims[0])
            else:
                await asyncio.gather(*(self._kill(victim) for victim in victims))
            if router is not None:
                await router.serving()
            number += 1
        self.report.by_keeper = sum(node.log.read_text().count(": killing it") for node in workers)

    async def upgrade(self, times: int) -> None:
        """Upgrades the only worker so many times, one after another."""
        [worker] = self._running.workers
        for _ in range(times):
            await self._upgrade(worker)

    async def _kill(self, worker: Node) -> None:
        starts = _starts(worker)
        self._die(worker, _child(worker), self._chosen.choice(DEATHS))
        if self._chosen.randrange(_SECOND_DEATHS) == 0:
            await asyncio.sleep(self._chosen.uniform(0.0, _START_SECONDS))
            if (child := _child(worker)) is not None:
                self._die(worker, child, signal.SIGKILL)
                starts = max(starts, _starts(worker))
        await self._restarted(worker, starts)

    async def _upgrade(self, worker: Node) -> None:
        await self._running.ready(_READY_SECONDS)
        starts = _starts(worker)
        asked = cluster_service_pb2.UpgradeWorkerRequest(worker_id=worker.name)
        await unary(self._running.operators.UpgradeWorker(asked, timeout=_READY_SECONDS))
        self.report.upgrades += 1
        await self._restarted(worker, starts)

    def _die(self, worker: Node, child: psutil.Process | None, death: signal.Signals) -> None:
        assert child is not None, f"{worker.name} does not run"
        os.kill(child.pid, death)
        self.report.kills += 1
        self.report.killed[worker.role] = self.report.killed.get(worker.role, 0) + 1
        self.report.stopped += death is signal.SIGSTOP
        self._streams.report.losses += 1

    async def _restarted(self, worker: Node, starts: int) -> None:
        """Waits for a process after the one that has started as the `starts`th, and adds up what it has found."""
        async with asyncio.timeout(_READY_SECONDS):
            while (found := _found(worker, starts)) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for outcome in ("whole", "cut", "ids", "damaged"):
            count = found.sum("baton_recovered_decodes_total", outcome=outcome)
            self.report.recovered[outcome] = self.report.recovered.get(outcome, 0.0) + count


def _child(worker: Node) -> psutil.Process | None:
    """The worker's process; None between two."""
    return next(iter(workers_of(worker.pid)), None)


def _starts(worker: Node) -> int:
    """The number of times that a worker became ready again: the log has a line for each."""
    return worker.log.read_text().count("worker was started again")


def _found(worker: Node, starts: int) -> Scrape | None:
    """The metrics of a worker that was started again more than so often; None before."""
    if _starts(worker) <= starts:
        return None
    try:
        return scrape(worker.metrics)
    except OSError:
        return None  # of a process that has just ended


def main() -> None:
    """Runs a keeper and its worker."""
    # Kills follow one another sooner than those of a cluster, and none of them is the fault of what is kept.
    keeper._PROVEN_SECONDS = 0.2
    arguments = sys.argv[1:]
    if "encode.yaml" not in arguments[0]:  # which has nothing to keep
        arguments.append(KEPT)
    raise SystemExit(ForkedKeeper(arguments).run())


if __name__ == "__main__":
    main()
