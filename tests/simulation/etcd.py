"""A simulated etcd, which the product's own client talks to over the simulated network.

One member: keys with revisions, leases that expire, and watches that may be slow, cancelled, or begin before what is
kept. It stands still during an outage, and what it was sent waits.
"""

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

import grpc
from grpc import StatusCode

from baton.etcd.v1 import kv_pb2, lease_pb2, watch_pb2
from baton_http2.client.dialing import DEFAULT_LIMITS
from baton_http2.server.server import Http2Server
from discovery.etcd.config import EtcdConfig
from discovery.etcd.methods import GRANT, KEEP_ALIVE, PUT, RANGE, REVOKE, TXN, WATCH
from discovery.etcd.registry import EtcdRegistry
from discovery.record import WorkerRecord
from discovery.registry import WorkerKeys
from simulation.loop import Node
from simulation.registry import NAME, TTL_SECONDS

_IP, _PORT = "10.0.1.1", 2379
_NAMESPACE = "simulation"
_CLUSTER = 7
# What a watch that begins has missed, and how often one is cancelled.
_COMPACTED = 0.1
_CANCEL_SECONDS = 20.0


class SimulatedEtcd:
    """The member. It has the face of a SimulatedRegistry."""

    def __init__(self, network: Any, seed: int) -> None:
        self._network = network
        self._random = random.Random(f"etcd-{seed}")
        self.late_seconds = self._random.choice((1e-3, 5e-3, 0.1, 1.0))
        self._node = Node(network.loop, NAME, _IP, 0)
        self._revision = 1
        self._entries: dict[bytes, kv_pb2.KeyValue] = {}
        self._events: list[watch_pb2.Event] = []  # each with the revision of its key
        self._leases: dict[int, asyncio.TimerHandle] = {}
        self._ids = itertools.count(1)
        self._changed = asyncio.Event()
        network.revive(self._node)
        self._node.spawn(self._serve())

    # As the world sees it.

    @property
    def is_away(self) -> bool:
        """True during an outage."""
        return self._node.paused

    @is_away.setter
    def is_away(self, is_away: bool) -> None:
        if is_away:
            self._node.paused = True
        elif self._node.paused:
            self._node.resume()

    @asynccontextmanager
    async def of(self, node: Node) -> AsyncGenerator[EtcdRegistry, None]:
        """The registry as one node has it, while the context is open."""
        del node
        config = EtcdConfig(endpoints=(f"{_IP}:{_PORT}",), call_timeout_seconds=1.0)
        async with EtcdRegistry(config, _NAMESPACE, TTL_SECONDS) as registry:
            yield registry

    def expire(self, name: str) -> None:
        """Forgets the record of a process that has kept its lease, as a member does that has lost what it knew."""
        for entry in [one for key, one in self._entries.items() if key.endswith(b"/" + name.encode()) and one.lease]:
            self._node.context().run(self._expire, entry.lease)

    async def blink(self, seconds: float) -> None:
        """Shows no worker for a while, as during a restore. Their records come back as they were."""
        lost = self._workers()
        self._revision += 1
        for entry in lost:
            self._delete(entry.key)
        await asyncio.sleep(seconds)
        for entry in [one for one in lost if one.lease in self._leases and one.key not in self._entries]:
            self._store(entry.key, entry.value, entry.lease)

    def registered(self) -> dict[str, int]:
        """The epochs of the workers that are registered, by their ids."""
        records = [_read(one.value) for one in self._workers()]
        return {record.worker_id: record.epoch for record in records}

    def _workers(self) -> list[kv_pb2.KeyValue]:
        keys = WorkerKeys(_NAMESPACE)
        return [one for key, one in self._entries.items() if keys.prefix <= key < keys.end]

    # The server.

    async def _serve(self) -> None:
        server = Http2Server((), DEFAULT_LIMITS)
        kinds: tuple[tuple[Any, Callable[..., Any], bool], ...] = (
            (RANGE, self._range, False),
            (PUT, self._put, False),
            (TXN, self._txn, False),
            (GRANT, self._grant, False),
            (REVOKE, self._revoke, False),
            (KEEP_ALIVE, self._keep_alive, True),
            (WATCH, self._watch, True),
        )
        for method, behaviour, is_stream in kinds:
            make = grpc.stream_stream_rpc_method_handler if is_stream else grpc.unary_unary_rpc_method_handler
            handler = make(behaviour, method.request.FromString, method.response.SerializeToString)
            _, service, name = method.path.split("/")
            server.add_registered_method_handlers(service, {name: handler})
        server.bind(f"{_IP}:{_PORT}")
        await server.start()
        await asyncio.Event().wait()

    async def _range(self, request: kv_pb2.RangeRequest, _context: Any) -> kv_pb2.RangeResponse:
        end = request.range_end or request.key + b"\0"
        found = [self._entries[key] for key in sorted(self._entries) if request.key <= key < end]
        return kv_pb2.RangeResponse(header=self._header(), kvs=found)

    async def _put(self, request: kv_pb2.PutRequest, context: Any) -> kv_pb2.PutResponse:
        await self._write(request, context)
        return kv_pb2.PutResponse(header=self._header())

    async def _txn(self, request: kv_pb2.TxnRequest, context: Any) -> kv_pb2.TxnResponse:
        succeeded = all(one.key not in self._entries for one in request.compare)
        for operation in request.success if succeeded else ():
            await self._write(operation.request_put, context)
        return kv_pb2.TxnResponse(header=self._header(), succeeded=succeeded)

    async def _write(self, request: kv_pb2.PutRequest, context: Any) -> None:
        if request.lease and request.lease not in self._leases:
            await context.abort(StatusCode.NOT_FOUND, "etcdserver: requested lease not found")
        self._store(request.key, request.value, request.lease)

    def _store(self, key: bytes, value: bytes, lease: int) -> None:
        self._revision += 1
        before = self._entries.get(key)
        entry = kv_pb2.KeyValue(key=key, value=value, lease=lease, mod_revision=self._revision)
        entry.create_revision = before.create_revision if before else self._revision
        self._entries[key] = entry
        self._tell(watch_pb2.Event(kv=entry))

    def _delete(self, key: bytes) -> None:
        """Of this revision."""
        del self._entries[key]
        self._tell(watch_pb2.Event(deleted=True, kv=kv_pb2.KeyValue(key=key, mod_revision=self._revision)))

    async def _grant(self, request: lease_pb2.LeaseGrantRequest, _context: Any) -> lease_pb2.LeaseGrantResponse:
        lease = next(self._ids)
        seconds = max(2, request.ttl_seconds)
        self._lengthen(lease, seconds)
        return lease_pb2.LeaseGrantResponse(header=self._header(), id=lease, ttl_seconds=seconds)

    async def _revoke(self, request: lease_pb2.LeaseRevokeRequest, context: Any) -> lease_pb2.LeaseRevokeResponse:
        if request.id not in self._leases:
            await context.abort(StatusCode.NOT_FOUND, "etcdserver: requested lease not found")
        self._expire(request.id)
        return lease_pb2.LeaseRevokeResponse(header=self._header())

    async def _keep_alive(
        self, requests: AsyncIterator[lease_pb2.LeaseKeepAliveRequest], _context: Any
    ) -> AsyncIterator[lease_pb2.LeaseKeepAliveResponse]:
        async for request in requests:
            seconds = 0
            if request.id in self._leases:
                # Its own whole seconds: as the client asked, and rounded up.
                seconds = max(2, int(TTL_SECONDS))
                self._lengthen(request.id, seconds)
            yield lease_pb2.LeaseKeepAliveResponse(header=self._header(), id=request.id, ttl_seconds=seconds)

    async def _watch(
        self, requests: AsyncIterator[watch_pb2.WatchRequest], _context: Any
    ) -> AsyncIterator[watch_pb2.WatchResponse]:
        request = await anext(requests)
        created = request.create_request
        if self._random.random() < _COMPACTED:
            yield watch_pb2.WatchResponse(header=self._header(), canceled=True, compact_revision=self._revision)
            return
        yield watch_pb2.WatchResponse(header=self._header(), created=True)
        probes = asyncio.ensure_future(anext(requests, None))
        loop, told = asyncio.get_running_loop(), created.start_revision - 1
        ends_at = loop.time() + self._random.expovariate(1 / _CANCEL_SECONDS)
        try:
            while loop.time() < ends_at:
                changed = asyncio.ensure_future(self._changed.wait())
                if told >= self._revision:
                    await asyncio.wait({changed, probes}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                if probes.done():
                    if probes.result() is None:
                        return
                    probes = asyncio.ensure_future(anext(requests, None))
                    yield watch_pb2.WatchResponse(header=self._header())
                if told < self._revision:
                    await asyncio.sleep(self._random.expovariate(1 / self.late_seconds))
                    events, told = self._since(told, created), self._revision
                    for event in events:
                        yield watch_pb2.WatchResponse(header=self._header(), events=[event])
        finally:
            probes.cancel()
        yield watch_pb2.WatchResponse(header=self._header(), canceled=True, cancel_reason="the member is restarted")

    def _since(self, revision: int, created: watch_pb2.WatchCreateRequest) -> list[watch_pb2.Event]:
        return [
            event
            for event in self._events
            if event.kv.mod_revision > revision and created.key <= event.kv.key < created.range_end
        ]

    def _header(self) -> kv_pb2.ResponseHeader:
        return kv_pb2.ResponseHeader(cluster_id=_CLUSTER, member_id=1, revision=self._revision, raft_term=1)

    def _lengthen(self, lease: int, seconds: float) -> None:
        if lease in self._leases:
            self._leases[lease].cancel()
        self._leases[lease] = self._network.loop.call_later(seconds, self._expire, lease, context=self._node.context())

    def _expire(self, lease: int) -> None:
        timer = self._leases.pop(lease, None)
        if timer is not None:
            timer.cancel()
        self._revision += 1
        for key in [key for key, entry in self._entries.items() if entry.lease == lease]:
            self._delete(key)

    def _tell(self, event: watch_pb2.Event) -> None:
        self._events.append(event)
        self._changed.set()
        self._changed = asyncio.Event()


@lru_cache(maxsize=256)
def _read(value: bytes) -> WorkerRecord:
    """The record in a value: it is asked for again and again."""
    return WorkerRecord.from_json(value)
