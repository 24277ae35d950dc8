"""Workers with the simulated engine, in this process or in their own, and how to call them."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.clients.worker_calls import WorkerCalls, calls_to
from support.clock import ManualClock, RunningClock
from support.cluster.processes import Process, StartProcess, forked

from discovery.memory import MemoryRegistry
from engine_protocol.roles import Role
from media.config import MediaConfig
from services.config import EncodeConfig, HandoffConfig, KeepConfig, WorkerConfig
from services.engines.simulated.config import SimulatedConfig
from services.server import Worker, host_worker
from services.sleeping.config import SleepConfig

# Long enough that no pause of a busy machine ends a lease that a test means to hold.
LEASE_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class Running:
    """A worker of this process, and its clients."""

    worker: Worker
    calls: WorkerCalls
    registry: MemoryRegistry
    clock: ManualClock | RunningClock  # of its leases

    def let_a_lease_pass(self) -> None:
        """Advances its clock by a lease: what is held then and has not been renewed since expires."""
        self.clock.advance(self.worker.leases.lease_seconds)

    @property
    def blocks_used(self) -> int:
        return self.worker.engines.load().blocks_used

    @property
    def blocks_held(self) -> int:
        return self.worker.engines.load().blocks_held


class Starter:
    """Starts workers that share a registry: `async with start("prefill", num_blocks=4) as running: ...`."""

    def __init__(self, **engine: object) -> None:
        """With options for the engines of all of them."""
        self.registry = MemoryRegistry("test")
        self._engine = engine

    @asynccontextmanager
    async def __call__(
        self,
        *roles: Role,
        lease_seconds: float = LEASE_SECONDS,
        drain_seconds: float = 0.0,
        transports: tuple[str, ...] = ("shm", "tcp"),
        encode: EncodeConfig | None = None,
        media: MediaConfig | None = None,
        keep: KeepConfig | None = None,
        clock: ManualClock | RunningClock | None = None,
        handoff: HandoffConfig | None = None,
        sleep: SleepConfig | None = None,
        **engine: object,
    ) -> AsyncIterator[Running]:
        clock = clock or RunningClock()
        config = WorkerConfig(
            roles=roles,
            engine=SimulatedConfig(**{"num_blocks": 64, "block_bytes": 1024, **self._engine, **engine}),  # type: ignore[arg-type]
            handoff=handoff or HandoffConfig(lease_seconds=lease_seconds),
            encode=encode or EncodeConfig(),
            media=media or MediaConfig(),
            keep=keep or KeepConfig(),
            sleep=sleep or SleepConfig(),
            transports=transports,
            drain_seconds=drain_seconds,
        )
        async with host_worker(config, self.registry, clock) as worker, calls_to(worker.address) as calls:
            running = Running(worker, calls, self.registry, clock)
            yield running
            # A drain waits for readers, which a test has no more when it ends.
            running.let_a_lease_pass()


@contextmanager
def worker_process(role: Role, folder: Path, *overrides: str, start: StartProcess = forked) -> Iterator[Process]:
    """A worker in a separate process, with its own registry, serving.

    `start` is `process` for tests of its start, of its end, and of another environment.
    """
    common = [
        "registry.kind=memory",
        "engine={kind: simulated, num_blocks: 64, block_bytes: 1024}",
        f"handoff.lease_seconds={LEASE_SECONDS}",
        "drain_seconds=1",
        "log.format=json",
    ]
    with start("services", f"{role}.yaml", [*common, *overrides], folder / f"{role}.log") as started:
        started.wait_until_serving()
        yield started
