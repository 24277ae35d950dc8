"""Workers as admission control sees them, in a fleet that a test changes."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from support.clock import ManualClock

from discovery.record import WorkerRecord
from router.routing.latency import WorkerLatency


@dataclass
class Measured:
    """A worker with or without measured speeds."""

    record: WorkerRecord
    latency: WorkerLatency
    problem: str = ""
    wake_seconds: float = 0.0


def measured(
    clock: ManualClock,
    *roles: str,
    model: str = "m",
    tokens_per_second: float = 0,
    token_seconds: float = 0,
    problem: str = "",
    draining: bool = False,
) -> Measured:
    """A worker of these roles; a speed of 0 was not measured."""
    latency = WorkerLatency(clock)
    for _ in range(4):
        if tokens_per_second:
            begun = latency.prompts.begin(500)
            clock.advance(500 / tokens_per_second)
            latency.prompts.end(begun, is_done=True)
        if token_seconds:
            latency.token_seconds.add(token_seconds)
    record = WorkerRecord(
        worker_id="-".join(roles),
        epoch=1,
        address="x:1",
        roles=roles,
        model=model,
        engine="simulated",
        layout_digest="a" * 64,
        max_context_tokens=4096,
        draining=draining,
    )
    return Measured(record, latency, problem)


@dataclass
class StaticFleet:
    """Workers that a test sets."""

    workers: Sequence[Measured] = ()
    version: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def set(self, *workers: Measured) -> None:
        """All the workers that there are from now on."""
        self.workers = workers
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self) -> None:
        await self._changed.wait()
