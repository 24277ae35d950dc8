"""Whatever a worker reports, or a registry record says: the router serves, and the other workers' streams go on."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest
from google.protobuf import descriptor
from google.protobuf.message import Message
from support.clients.scraping import sample, since
from support.clients.worker_calls import calls_to, decode_request
from support.cluster.in_process import DECODE, FAST_ROUTER, PREFILL, Bench, bench, simulated
from support.eventually import eventually
from support.router.worker_views import worker as record_of
from support.servers.tampering import Reply, Tampered, tampered

from baton.engine.v1 import worker_pb2, worker_pb2_grpc
from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2, lora_pb2
from baton.inference.v1.model_pb2 import ModelCapabilities, ModelLimits
from discovery.record import LORA, WorkerRecord
from router.config import RoutingConfig
from router.placement.kv_events import KvSubscriber
from router.routing.policy import KnownLoras
from router.routing.prefix.prefix_caches import Cache, PrefixCaches
from router.text.served_model import ServedModel
from router.workers import loras
from router.workers.loras import find_lora, loras_of_model, split_name, watch_loras
from rpc.channels import open_channel
from rpc.health import Health
from rpc.server import Service, serve

PREDICTING = FAST_ROUTER.model_copy(update={"routing": RoutingConfig(policy="predicted_seconds")})
HASHES = [number.to_bytes(16, "little") for number in range(12_000)]
REQUEST = {"prompt": "hello" * 20, "stopping": {"max_tokens": 3}}
Event = worker_pb2.SubscribeKvEventsResponse

# What a KV event says: of a worker with one rank and 128 blocks.
EVENTS: dict[str, dict[str, Any]] = {
    "a short hash": {"stored": {"block_hashes": [b"1234567"]}},
    "an empty hash": {"changed": {"stored": [b""]}},
    "a short hash removed": {"changed": {"removed": [b"123"]}},
    "a long hash": {"stored": {"block_hashes": [b"1" * 100_000]}},
    "another rank": {"data_parallel_rank": 1, "stored": {"block_hashes": [b"12345678"]}},
    "a large rank": {"data_parallel_rank": 2**32 - 1, "snapshot": {}},
    "a missing message": {"sequence": 7, "stored": {"block_hashes": [b"12345678"]}},
    "the last rank of all": {"data_parallel_rank": 2**31, "stored": {"block_hashes": [b"12345678"]}},
    "too many hashes": {"snapshot": {"block_hashes": [n.to_bytes(16, "little") for n in range(20_000)]}},
    "a million hashes": {"stored": {"block_hashes": [n.to_bytes(16, "little") for n in range(1_000_000)]}},
    "too many hashes together": {"changed": {"stored": HASHES[:3000], "removed": HASHES[:3000]}},
    "too many moves": {"changed": {"moved": [{"block_hashes": [b"12345678"], "tier": 2}] * 9}},
    "an unknown rank of a heartbeat": {"data_parallel_rank": 3, "changed": {}},
}


async def serves(running: Bench) -> None:
    """The router answers a request, on workers that are well."""
    assert len((await running.generate(**REQUEST)).token_ids) == 3


async def stores_blocks(worker: Tampered) -> None:
    """The worker computes a prompt, and so has KV events to send at once."""
    assert worker.worker is not None
    async with calls_to(worker.worker.address) as calls:
        await calls.decode(decode_request())


@pytest.mark.parametrize("name", EVENTS)
async def test_kv_events_that_a_worker_may_not_send_end_its_subscription_only(name: str) -> None:
    def changed(reply: Event) -> Iterator[Reply]:
        yield Event(**{"epoch": reply.epoch, "sequence": reply.sequence, **EVENTS[name]})

    faults = since("baton_router_worker_faults_total", stage="kv_events")
    async with bench(PREFILL, DECODE, router=PREDICTING) as running:
        await serves(running)
        small = simulated("broken", "prefill", "decode", num_blocks=128)
        async with tampered(running, small, multiplexed=True) as broken:
            await eventually(lambda: broken.worker is not None and running.cluster.workers[-1].load.blocks_total > 0)
            views = {one.worker_id: one.cache_view for one in await running.list_workers()}
            broken.changes["SubscribeKvEvents"] = changed
            await serves(running)
            await stores_blocks(broken)
            await eventually(lambda: faults.grown > 0)
            assert sample("baton_router_lost_report_streams", reports="kv_events") == 1
            views = {one.worker_id: one.cache_view for one in await running.list_workers()}
            assert views["broken"] == generate_pb2.CACHE_VIEW_ESTIMATED
            assert views["p1"] == generate_pb2.CACHE_VIEW_REPORTED
            await serves(running)
        await serves(running)


def _repeated(reply: Event) -> Iterator[Reply]:
    while True:
        yield reply


def _grown_and_gone(reply: Event) -> Iterator[Reply]:
    for turn in count():
        kind = "removed" if turn % 2 else "stored"
        yield Event(epoch=reply.epoch, sequence=reply.sequence + turn, **{kind: {"block_hashes": HASHES[:1000]}})


def _of_no_known_tier(reply: Event) -> Iterator[Reply]:
    for turn in count():
        stored = {"block_hashes": HASHES[:100], "tier": 77}
        yield Event(epoch=reply.epoch, sequence=reply.sequence + turn, stored=stored)


@pytest.mark.parametrize("endless", [_repeated, _grown_and_gone, _of_no_known_tier])
async def test_kv_events_without_a_pause_harm_nobody_else(endless: Callable[[Event], Iterator[Reply]]) -> None:
    async with bench(PREFILL, DECODE, router=PREDICTING) as running:
        async with tampered(running, simulated("broken", "prefill", "decode"), multiplexed=True) as broken:
            broken.changes["SubscribeKvEvents"] = endless
            await eventually(lambda: running.cluster.workers[-1].load.blocks_total > 0)
            for _ in range(5):
                await serves(running)
            views = {one.worker_id: one.cache_view for one in await running.list_workers()}
            assert views["p1"] == generate_pb2.CACHE_VIEW_REPORTED
        await serves(running)


async def test_more_blocks_than_a_worker_has_end_its_subscription() -> None:
    faults = since("baton_router_worker_faults_total", stage="kv_events")

    def changed(reply: Event) -> Iterator[Reply]:
        for turn in range(3):
            part = {"block_hashes": HASHES[4000 * turn : 4000 * (turn + 1)]}
            # Of a subscription that has just begun, or has run for a while.
            yield Event(epoch=reply.epoch, sequence=reply.sequence + turn, stored=part)

    small = simulated("broken", "prefill", "decode", num_blocks=128)
    async with bench(PREFILL, DECODE, router=PREDICTING) as running:
        async with tampered(running, small, multiplexed=True) as broken:
            await eventually(lambda: running.cluster.workers[-1].load.blocks_total > 0)
            broken.changes["SubscribeKvEvents"] = changed
            await stores_blocks(broken)
            await eventually(lambda: faults.grown > 0)
        await serves(running)


async def test_what_a_worker_has_told_without_a_snapshot_is_forgotten_with_its_subscription() -> None:
    def changed(reply: Event) -> Iterator[Reply]:
        for turn in range(3):
            many = HASHES[4000 * turn : 4000 * (turn + 1)]
            yield Event(epoch=reply.epoch, sequence=turn, stored={"block_hashes": many})

    faults = since("baton_router_worker_faults_total", stage="kv_events")
    small = simulated("broken", "prefill", num_blocks=128)
    async with bench(PREFILL, DECODE) as running, tampered(running, small, multiplexed=False) as broken:
        broken.changes["SubscribeKvEvents"] = changed
        caches = PrefixCaches()
        following = asyncio.ensure_future(KvSubscriber(running.cluster, caches, caches.drop).follow())
        try:
            await eventually(lambda: faults.grown > 0)
            [record] = [one.record for one in running.cluster.workers if one.record.worker_id == "broken"]
            assert caches.num_blocks(Cache(record.process, 0)) == 0
        finally:
            following.cancel()
            await asyncio.wait([following])


INVENTORIES = {
    "too many adapters": [lora_pb2.LoraAdapter(name=f"a{number}", digest="1") for number in range(5000)],
    "a long name": [lora_pb2.LoraAdapter(name="a" * 8 * 2**20, digest="1")],
}


class Adapters(worker_pb2_grpc.WorkerServiceServicer):
    """A worker that reports these adapters."""

    def __init__(self, adapters: list[lora_pb2.LoraAdapter]) -> None:
        self._inventory = lora_pb2.LoraInventory(available=adapters)

    async def WatchLoras(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.WatchLorasResponse]:
        yield worker_pb2.WatchLorasResponse(inventory=self._inventory)
        await asyncio.Event().wait()


@pytest.mark.parametrize("name", INVENTORIES)
async def test_an_inventory_of_adapters_that_is_too_large_counts_as_none(name: str) -> None:
    add = worker_pb2_grpc.add_WorkerServiceServicer_to_server
    service = Service("baton.engine.v1.WorkerService", add, Adapters(INVENTORIES[name]))
    faults = since("baton_router_worker_faults_total", stage="loras")
    noted: list[KnownLoras] = []
    async with (
        serve("127.0.0.1:0", [service], health=Health(), drain_seconds=0) as server,
        open_channel(server.address) as channel,
    ):
        watching = asyncio.ensure_future(
            watch_loras("broken", worker_pb2_grpc.WorkerServiceStub(channel), noted.append)
        )
        await eventually(lambda: faults.grown > 0)
        watching.cancel()
    [known] = set(noted)
    workers: list[Any] = [
        Adapted(replace(record_of(name), capabilities=(LORA,)), loras)
        for name, loras in (("broken", known), ("well", KnownLoras.of(lora_pb2.LoraInventory())))
    ]
    # A name that no worker has is wrong, and not one that a worker may still tell of.
    with pytest.raises(InvalidRequest, match="known are none"):
        find_lora(workers, _model_of(workers), "none")


class Silent(worker_pb2_grpc.WorkerServiceServicer):
    """A worker that never tells its adapters."""

    async def WatchLoras(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.WatchLorasResponse]:
        await asyncio.Event().wait()
        yield worker_pb2.WatchLorasResponse()


async def test_a_worker_that_never_tells_its_adapters_counts_as_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loras, "TELLING_SECONDS", 0.1)
    add = worker_pb2_grpc.add_WorkerServiceServicer_to_server
    service = Service("baton.engine.v1.WorkerService", add, Silent())
    faults = since("baton_router_worker_faults_total", stage="loras")
    noted: list[KnownLoras] = []
    async with (
        serve("127.0.0.1:0", [service], health=Health(), drain_seconds=0) as server,
        open_channel(server.address) as channel,
    ):
        control = worker_pb2_grpc.WorkerServiceStub(channel)
        watching = asyncio.ensure_future(watch_loras("silent", control, noted.append))
        await eventually(lambda: noted == [KnownLoras(is_reported=True)])
        watching.cancel()
    assert faults.grown == 1


def test_many_adapters_are_listed_and_named_in_errors_in_little_time() -> None:
    many = [lora_pb2.LoraAdapter(name=f"a{number}", digest="1") for number in range(4096)]
    workers: list[Any] = [
        Adapted(record_of(f"w{n}"), KnownLoras.of(lora_pb2.LoraInventory(available=many))) for n in (1, 2)
    ]
    workers = [replace(worker, record=replace(worker.record, capabilities=(LORA,))) for worker in workers]
    assert len(loras_of_model(workers, workers[0].record.model)) == 4096
    with pytest.raises(InvalidRequest, match=r"known are a0, a1, .* and 4086 more"):
        find_lora(workers, _model_of(workers), "none")


def test_a_name_that_is_longer_than_any_is_none_of_an_adapter() -> None:
    assert [*split_name("model:adapter")] == [("model", "adapter")]
    assert not [*split_name(":" * 30_000)]


def _model_of(workers: list[Any]) -> ServedModel:
    return ServedModel(workers[0].record.model, ModelLimits(), ModelCapabilities(), frozenset(), None)


@dataclass(frozen=True)
class Adapted:
    """A worker with adapters."""

    record: WorkerRecord
    loras: KnownLoras
    problem: str = ""


def extremes(message: Message) -> Iterator[tuple[descriptor.FieldDescriptor, Any]]:
    """Each scalar field of a message, with a value at an end of its range."""
    for field in message.DESCRIPTOR.fields:
        match field.cpp_type:
            case field.CPPTYPE_UINT32:
                yield field, 2**32 - 1
            case field.CPPTYPE_UINT64:
                yield field, 2**64 - 1
            case field.CPPTYPE_INT32:
                yield field, -(2**31)
            case field.CPPTYPE_INT64:
                yield field, 2**63 - 1
            case field.CPPTYPE_ENUM:
                yield field, 77
            case field.CPPTYPE_DOUBLE | field.CPPTYPE_FLOAT:
                yield field, float("nan")


def exaggerate(message: Message) -> None:
    """Sets every number in a message, at every depth, to an end of its range."""
    for field, value in extremes(message):
        if field.is_repeated:
            continue
        setattr(message, field.name, value)
    for field, value in message.ListFields():
        if field.cpp_type != field.CPPTYPE_MESSAGE or field.message_type.GetOptions().map_entry:
            continue
        for one in value if field.is_repeated else [value]:
            exaggerate(one)


@pytest.mark.parametrize("policy", ["least_loaded", "predicted_seconds"])
@pytest.mark.parametrize(
    "method", ["WatchLoad", "SubscribeKvEvents", "GetModel", "WatchLoras", "Renew", "Release", "Abort"]
)
async def test_numbers_at_the_ends_of_their_ranges_harm_no_other_request(method: str, policy: str) -> None:
    def changed(reply: Message) -> Iterable[Reply]:
        exaggerate(reply)
        return [reply]

    failures = {name: sample("baton_task_failures_total", task=name) for name in TASKS}
    router = FAST_ROUTER.model_copy(update={"routing": RoutingConfig(policy=policy)})
    async with bench(PREFILL, DECODE, router=router) as running:
        async with tampered(running, simulated("broken", "prefill", "decode"), multiplexed=True) as broken:
            broken.changes[method] = changed
            for _ in range(5):
                await serves(running)
            await running.list_workers()
        await serves(running)
    assert failures == {name: sample("baton_task_failures_total", task=name) for name in TASKS}


TASKS = (
    *("worker_health", "worker_checks", "worker_load", "worker_card", "worker_loras", "registry", "health"),
    *("admission", "kv_subscriptions", "kv_events", "embedding_cache", "embedding_leases"),
)

# Records that a registry may hold, as changes of one that is well.
RECORDS: list[dict[str, Any]] = [
    {"roles": ()},
    {"roles": ("conductor", "", "decode", "decode")},
    {"model": ""},
    {"model": "x" * 100_000},
    {"worker_id": "p1", "epoch": 2**64 - 1},
    {"epoch": 2**64 - 1},
    {"address": ""},
    {"address": ":"},
    {"address": "127.0.0.1:99999999999"},
    {"address": "\0\n:1"},
    {"address": "é" * 300 + ":1"},
    {"layout_digest": "", "capabilities": ("multiplex", "", "future")},
    {"max_context_tokens": 2**64 - 1, "data_parallel_ranks": 512},
    {"max_context_tokens": 0},
    {"offers": (), "reads": ("carrier pigeon",)},
    {"capabilities": ("multiplex", "lora", "early_handoff", "allocates_first")},
]


@pytest.mark.parametrize("change", RECORDS, ids=lambda change: "-".join(change))
async def test_no_record_of_a_registry_stops_the_router(change: dict[str, Any]) -> None:
    failures = {name: sample("baton_task_failures_total", task=name) for name in TASKS}
    async with bench(PREFILL, DECODE, router=PREDICTING) as running:
        record = replace(record_of("odd"), **change)
        async with running.registry.register(record):
            await eventually(lambda: record.process in {one.record.process for one in running.cluster.workers})
            await serves(running)
            await running.list_workers()
        await eventually(lambda: {one.record.worker_id for one in running.cluster.workers} == {"p1", "d1"})
        await serves(running)
    assert failures == {name: sample("baton_task_failures_total", task=name) for name in TASKS}


async def test_a_record_that_changes_its_ranks_keeps_those_it_came_with() -> None:
    two = simulated("r1", "prefill", "decode", data_parallel_ranks=2)
    async with bench(router=PREDICTING, proxied=False) as running:
        worker = await running.start(two)
        await running.ready(1)
        record = running.cluster.workers[0].record
        for ranks in (1, 7, 2):
            async with running.registry.register(replace(record, data_parallel_ranks=ranks)):
                for _ in range(6):
                    await serves(running)
        assert worker.engine is not None


def test_every_field_of_a_report_is_exaggerated() -> None:
    """The walk reaches what it should: a guard of the tests above."""
    reply = worker_pb2.WatchLoadResponse()
    reply.load.SetInParent()
    exaggerate(reply)
    assert reply.load.running == 2**32 - 1
    assert reply.load.waiting_prefill_tokens == 2**64 - 1
