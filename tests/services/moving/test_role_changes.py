"""A change of a worker's role that is given up at any point, or that comes while the new role has work."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace

import pytest
from support.clients.worker_calls import calls_to
from support.cluster.in_process import running_stream, simulated
from support.cluster.moving import decoders, shared
from support.eventually import PATIENCE_SECONDS, eventually

from baton import AsyncClient
from baton.errors import Draining, RoleMismatch
from discovery.memory import MemoryRegistry
from discovery.registry import Registration, WorkerRecord
from services.engines.simulated.config import SimulatedConfig
from services.engines.simulated.engine import SimulatedEngine
from services.handoff.leases import LeaseTable
from services.handoff.service import HandoffOwner
from services.identity import Identity, WorkerRegistration
from services.moving.roles import RoleChanger
from services.moving.running import RunningDecodes, Shedding
from services.requests.calls import Calls
from services.requests.fault_injection import FaultReader

LONG = {"prompt": "hello " * 20, "stopping": {"max_tokens": 400, "ignore_eos": True}}


class Away(MemoryRegistry):
    """A registry that does not answer the first change of a record."""

    def __init__(self) -> None:
        super().__init__("test")
        self.asked = asyncio.Event()

    @asynccontextmanager
    async def register(self, record: WorkerRecord) -> AsyncIterator[Registration]:
        async with super().register(record) as registration:
            yield Slow(registration, self.asked)


class Slow:
    """A registration in it."""

    def __init__(self, registration: Registration, asked: asyncio.Event) -> None:
        self._registration = registration
        self._asked = asked

    @property
    def registered(self) -> bool:
        return self._registration.registered

    async def update(self, record: WorkerRecord) -> None:
        is_first = not self._asked.is_set()
        self._asked.set()
        if is_first:
            await asyncio.sleep(PATIENCE_SECONDS)
        await self._registration.update(record)


async def test_a_change_that_is_given_up_while_the_registry_is_away_leaves_the_role() -> None:
    identity = Identity("x", ("decode",), "demo", 1)
    record = WorkerRecord("x", 1, "127.0.0.1:1", ("decode",), "demo", "simulated", "layout", 1024)
    registry, calls = Away(), Calls(identity, FaultReader(False))
    engine = SimulatedEngine(SimulatedConfig())
    async with LeaseTable(5.0) as leases, engine:
        registration, other = WorkerRegistration(registry), WorkerRegistration(registry)
        await registration.register(record)
        await other.register(replace(record, worker_id="y"))
        shedding = Shedding(RunningDecodes(HandoffOwner(identity, engine.facts.layout), leases), calls)
        changer = RoleChanger(identity, registration, lambda: replace(record, roles=identity.roles), calls, leases)

        async def change() -> None:
            async with aclosing(changer.change("prefill", engine, shedding)) as stages:
                async for _ in stages:
                    continue

        changing = asyncio.ensure_future(change())
        await registry.asked.wait()
        changing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await changing
        assert (identity.roles, identity.leaving) == (("decode",), ())
        with pytest.raises(RoleMismatch):
            identity.require_role("prefill")
        await registration.withdraw()
        await other.withdraw()


async def test_a_change_ends_while_the_new_role_always_holds_a_handoff() -> None:
    async with (
        shared(*decoders("d1", "x"), simulated("p1", "prefill")) as cluster,
        calls_to(cluster.workers["x"].address) as direct,
        AsyncClient(cluster.bench.address) as client,
    ):
        done = asyncio.Event()

        async def prefill() -> int:
            count, held = 0, None
            while not done.is_set():
                try:
                    following = await direct.prefill(f"r{count}")
                except (RoleMismatch, Draining):
                    await asyncio.sleep(0.001)
                    continue
                if held is not None:
                    await direct.release(held)
                held, count = following, count + 1
                await asyncio.sleep(0.001)
            if held is not None:
                await direct.release(held)
            return count

        load = asyncio.ensure_future(prefill())
        try:
            async with AsyncExitStack() as streams:
                for _ in range(8):
                    await streams.enter_async_context(running_stream(cluster.bench, 3, **LONG))
                assert cluster.running("x")
                await client.change_role("x", "prefill", timeout_seconds=30)
            assert cluster.workers["x"].identity.roles == ("prefill",)
            await eventually(lambda: len(cluster.workers["x"].leases) > 0)
        finally:
            done.set()
            assert await load > 0
