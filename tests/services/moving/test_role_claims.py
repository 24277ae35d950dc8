"""Changes of roles at once: whoever asks, and whatever is lost or stands still, a role keeps its last worker."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace

import pytest
from support.clients.worker_calls import calls_to
from support.cluster.in_process import simulated
from support.eventually import PATIENCE_SECONDS
from support.servers.etcd import EtcdServer

from baton.calls import stream
from baton.engine.v1 import worker_pb2
from baton.errors import RoleMismatch, Unavailable
from discovery.etcd import EtcdConfig, EtcdRegistry
from discovery.etcd.registration import EtcdAllocatedId
from discovery.memory import MemoryRegistry
from discovery.record import WorkerRecord
from discovery.registry import Registration, Registry, WorkerKeys
from runtime.entropy import token_hex
from services.moving.roles import RoleClaim, kind_of
from services.server import Worker, host_worker


@dataclass
class Workers:
    """Two decode workers and a prefill worker."""

    registry: Registry
    decoders: list[Worker]

    async def change(self, number: int, role: str = "prefill") -> None:
        """Asks one of the decode workers, as a router does."""
        async with calls_to(self.decoders[number].address) as calls:
            asked = worker_pb2.ChangeRoleRequest(role=role)
            async with aclosing(stream(calls.worker.ChangeRole(asked, timeout=PATIENCE_SECONDS))) as answers:
                async for _ in answers:
                    continue

    async def roles(self) -> list[tuple[str, ...]]:
        """The roles of the decode workers as the registry has them."""
        async with aclosing(self.registry.watch()) as views:
            records = {record.worker_id: record for record in await anext(views)}
        return [records[worker.worker_id].roles for worker in self.decoders]


@asynccontextmanager
async def _started(registry: Registry) -> AsyncIterator[Workers]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(host_worker(simulated("p1", "prefill"), registry))
        configs = [simulated(name, "decode") for name in ("d1", "d2")]
        yield Workers(registry, [await stack.enter_async_context(host_worker(one, registry)) for one in configs])


@pytest.fixture(params=["memory", "etcd"])
async def workers(request: pytest.FixtureRequest) -> AsyncIterator[Workers]:
    if request.param == "memory":
        async with _started(MemoryRegistry("test")) as started:
            yield started
        return
    server: EtcdServer = request.getfixturevalue("shared_etcd")
    async with (
        EtcdRegistry(EtcdConfig(endpoints=(server.endpoint,)), f"claims-{token_hex(4)}") as registry,
        _started(registry) as started,
    ):
        yield started


async def test_of_two_workers_that_change_at_once_one_keeps_the_role(workers: Workers) -> None:
    for _ in range(3):
        outcomes = await asyncio.gather(workers.change(0), workers.change(1), return_exceptions=True)
        [refused] = [one for one in outcomes if one is not None]
        assert isinstance(refused, RoleMismatch)
        assert "is the only one of demo with the role decode" in refused.message
        kept = outcomes.index(refused)
        assert (await workers.roles())[kept] == ("decode",)
        assert (await workers.roles())[1 - kept] == ("prefill",)
        await workers.change(1 - kept, "decode")


async def test_a_claim_whose_holder_has_died_ends_with_its_lease(shared_etcd: EtcdServer) -> None:
    namespace = f"claims-{token_hex(4)}"
    async with EtcdRegistry(EtcdConfig(endpoints=(shared_etcd.endpoint,)), namespace) as registry:
        dead = EtcdAllocatedId(registry._client, WorkerKeys(namespace).ids(kind_of("demo")), 1, 2.0)
        await dead.begin(PATIENCE_SECONDS)
        async with _started(registry) as workers:
            await workers.change(0)
            assert await workers.roles() == [("prefill",), ("decode",)]


OURS = WorkerRecord("d1", 1, "127.0.0.1:1", ("decode",), "demo", "simulated", "layout", 1024)
THEIRS = replace(OURS, worker_id="d2")


class Changing:
    """A worker that gives its role up: `write` is done while it has the claim."""

    def __init__(self, registry: Registry) -> None:
        self._claim = RoleClaim(registry)
        self.record = OURS

    async def give_up(self, *write: tuple[Registration, WorkerRecord]) -> None:
        async with self._claim.giving_up(("decode",), lambda: self.record):
            self.record = replace(OURS, roles=("prefill",))
            for registration, record in write:
                await registration.update(record)


async def test_a_holder_that_stood_still_for_longer_than_its_lease_is_the_second_and_refused() -> None:
    registry = MemoryRegistry("test")
    async with registry.register(OURS) as mine, registry.register(THEIRS) as other:
        writes = [(each, replace(record, roles=("prefill",))) for each, record in ((other, THEIRS), (mine, OURS))]
        with pytest.raises(RoleMismatch, match="d1 is the only one"):
            await Changing(registry).give_up(*writes)


async def test_a_change_that_the_registry_does_not_show_is_refused() -> None:
    registry = MemoryRegistry("test")
    async with registry.register(OURS), registry.register(THEIRS):
        with pytest.raises(Unavailable, match="does not show the change"):
            await Changing(registry).give_up()


async def test_workers_of_another_model_or_that_drain_do_not_have_the_role() -> None:
    registry = MemoryRegistry("test")
    async with AsyncExitStack() as stack:
        for record in (OURS, replace(THEIRS, model="other"), replace(THEIRS, worker_id="d3", draining=True)):
            await stack.enter_async_context(registry.register(record))
        with pytest.raises(RoleMismatch, match="d1 is the only one of demo with the role decode"):
            await Changing(registry).give_up()
