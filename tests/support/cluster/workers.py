"""Workers with the simulated engine, in this process or in their own, and how to call them."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.clients.worker_calls import WorkerCalls, calls_to
from support.cluster.processes import Process, process

from discovery.memory import MemoryRegistry
from media.config import MediaConfig
from services.config import EncodeConfig, HandoffConfig, WorkerConfig
from services.engines.simulated.config import SimulatedConfig
from services.handoff.leases import MONOTONIC, LeaseClock
from services.identity import Role
from services.server import Worker, host_worker

# Long enough that no pause of a busy machine ends a lease that a test means to hold.
LEASE_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class Running:
    """A worker of this process, and its clients."""

    worker: Worker
    calls: WorkerCalls
    registry: MemoryRegistry

    @property
    def blocks_used(self) -> int:
        return self.worker.engines.load().blocks_used

    @property
    def blocks_held(self) -> int:
        return self.worker.engines.load().blocks_held


class Starter:
    """Starts workers that share a registry: `async with start("prefill", num_blocks=4) as running: ...`."""

    def __init__(self) -> None:
        self.registry = MemoryRegistry("test")

    @asynccontextmanager
    async def __call__(
        self,
        *roles: Role,
        lease_seconds: float = LEASE_SECONDS,
        drain_seconds: float = 0.0,
        transports: tuple[str, ...] = ("shm", "tcp"),
        encode: EncodeConfig | None = None,
        media: MediaConfig | None = None,
        clock: LeaseClock = MONOTONIC,
        **engine: object,
    ) -> AsyncIterator[Running]:
        config = WorkerConfig(
            roles=roles,
            engine=SimulatedConfig(**{"num_blocks": 64, "block_bytes": 1024, **engine}),  # type: ignore[arg-type]
            handoff=HandoffConfig(lease_seconds=lease_seconds),
            encode=encode or EncodeConfig(),
            media=media or MediaConfig(),
            transports=transports,
            drain_seconds=drain_seconds,
        )
        async with host_worker(config, self.registry, clock) as worker, calls_to(worker.address) as calls:
            yield Running(worker, calls, self.registry)


@contextmanager
def worker_process(role: Role, folder: Path, *overrides: str) -> Iterator[Process]:
    """A worker in a separate process, with its own registry, serving."""
    common = [
        "registry.kind=memory",
        "engine={kind: simulated, num_blocks: 64, block_bytes: 1024}",
        f"handoff.lease_seconds={LEASE_SECONDS}",
        "drain_seconds=1",
        "log.format=json",
    ]
    with process("services", f"{role}.yaml", [*common, *overrides], folder / f"{role}.log") as started:
        started.wait_until_serving()
        yield started
