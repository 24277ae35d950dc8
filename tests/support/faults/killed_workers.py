"""Workers with keepers that are killed again and again under kept streams, alone or together with a router.

As a program it is a worker of this kind: `python -m support.faults.killed_workers CONFIG key=value...`.
"""

import asyncio
import os
import random
import signal
import sys
from dataclasses import dataclass, field

import psutil
from support.clients.scraping import Scrape, scrape
from support.cluster.fleet import Fleet, FleetPlan, Node
from support.faults.lost_routers import Streams

from services.keeper import keeper

KEPT = "keep_memory={weights: true, kv: true, hang_seconds: 3}"
ROUTER = (
    "probe={interval_seconds: 0.3, timeout_seconds: 3, hung_seconds: 6}",
    "retry={wait_seconds: 120, reattach_seconds: 30, max_attempts: 20}",
    "drain_seconds=1",
)
DEATHS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP)
_READY_SECONDS = 120.0


@dataclass(slots=True)
class Kills:
    """What was killed, and what the processes that followed have found."""

    kills: int = 0
    routers: int = 0
    recovered: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        found = ", ".join(f"{count:.0f} {outcome}" for outcome, count in sorted(self.recovered.items()))
        with_routers = f" ({self.routers} together with a router)" if self.routers else ""
        return f"{self.kills} kills of workers{with_routers}: decodes found {found}"


_ENGINE = (
    "engine={kind: pytorch, model: models/demo, name: demo, device: cpu, execution: fused, threads: 1, "
    "kv_cache_bytes: 16MiB}"
)


def plan(namespace: str, etcd: str, *, apart: bool) -> FleetPlan:
    """A worker for prompts and one for decodes, or one for both; and two routers."""
    worker = (_ENGINE, KEPT, "handoff.lease_seconds=2", "drain_seconds=1")
    if not apart:
        worker = (*worker, "roles=[prefill, decode]")
    module = "support.faults.killed_workers"
    count = int(apart)
    return FleetPlan(
        namespace, etcd, worker, ROUTER, encode=0, prefill=count, decode=1, routers=2, module=module, metrics=True
    )


class Killer:
    """Kills the workers of a fleet in turn, each at a random moment while streams run."""

    def __init__(self, running: Fleet, streams: Streams, seed: int = 0) -> None:
        self._running, self._streams = running, streams
        self._chosen = random.Random(seed)
        self.report = Kills()

    async def kill(self, times: int, *, routers: bool) -> None:
        """Kills so many workers; every third time a router too, at the same moment."""
        nodes = [node for node in self._running.nodes.values() if node.role == "router"]
        for number in range(times):
            worker = self._running.workers[number % len(self._running.workers)]
            await asyncio.sleep(self._chosen.uniform(0.3, 2.5))
            death = self._chosen.choice(DEATHS)
            os.kill(_child(worker).pid, death)
            self.report.kills += 1
            self._streams.report.losses += 1
            router = nodes[number % 2]
            if routers and number % 3 == 0:
                self.report.routers += 1
                router.kill()
                router.start()
            await self._restarted(worker, number)
            if routers:
                await router.serving()

    async def _restarted(self, worker: Node, number: int) -> None:
        """Waits for the worker's next process, and adds up what it has found."""
        starts = number // len(self._running.workers) + 1
        async with asyncio.timeout(_READY_SECONDS):
            while (found := _found(worker, starts)) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for outcome in ("whole", "cut", "ids", "damaged"):
            count = found.sum("baton_recovered_decodes_total", outcome=outcome)
            self.report.recovered[outcome] = self.report.recovered.get(outcome, 0.0) + count


def _child(worker: Node) -> psutil.Process:
    [child] = psutil.Process(worker.pid).children()
    return child


def _found(worker: Node, starts: int) -> Scrape | None:
    """The metrics of a worker that has started again so often; None before. The log has a line for each start again."""
    if worker.log.read_text().count("worker was started again") < starts:
        return None
    try:
        return scrape(worker.metrics)
    except OSError:
        return None  # of a process that has just ended


if __name__ == "__main__":
    # Kills follow one another sooner than those of a cluster, and none of them is the fault of what is kept.
    keeper._PROVEN_SECONDS = 0.2
    raise SystemExit(keeper.Keeper([sys.executable, "-m", "services", *sys.argv[1:]]).run())
