"""The calls on etcd that discovery needs, each with its deadline, on whichever member answers."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from baton.etcd.v1 import kv_pb2, lease_pb2, watch_pb2
from grpc import StatusCode, aio
from typing_extensions import Self

from discovery.etcd.config import EtcdConfig
from discovery.etcd.endpoints import Endpoint, Endpoints
from discovery.etcd.methods import GRANT, KEEP_ALIVE, PUT, RANGE, REVOKE, TXN, WATCH, Metadata
from discovery.etcd.token import Token
from discovery.etcd.watch_stream import WatchStream
from rpc.errors import BatonError, PermissionDenied, Unavailable

Response = TypeVar("Response")

_CREATE = 1  # etcd's Compare.CompareTarget


class LeaseLost(BatonError):
    """etcd does not know the lease (any more)."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that etcd has granted. `deadline` is by time.monotonic, counted from before etcd was asked.

    So it never lies behind etcd's own.
    """

    lease_id: int
    deadline: float

    @property
    def holds(self) -> bool:
        """Whether etcd keeps it still, as far as can be known here."""
        return time.monotonic() < self.deadline


@dataclass(frozen=True, slots=True)
class Listing:
    """The keys of a range at one revision of one cluster."""

    cluster_id: int
    revision: int
    entries: tuple[kv_pb2.KeyValue, ...]


class EtcdClient:
    """A client of one etcd cluster: `async with EtcdClient(config) as client: ...`.

    Every method raises Unavailable when no member has answered within its deadline, Unauthenticated and
    PermissionDenied when etcd refuses us.
    """

    def __init__(self, config: EtcdConfig) -> None:
        self._limit = config.call_timeout_seconds
        self._endpoints = Endpoints(config.addresses, config.tls)
        self._token = Token(config.username, config.password, config.call_timeout_seconds)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._endpoints.close()

    async def list_range(self, first: bytes, end: bytes) -> Listing:
        """All keys from `first` up to, not including, `end`, as the majority has them."""
        request = kv_pb2.RangeRequest(key=first, range_end=end)
        response = await self._anywhere(lambda at, metadata: RANGE.call(at.channel, request, metadata, self._limit))
        return Listing(response.header.cluster_id, response.header.revision, tuple(response.kvs))

    async def get(self, key: bytes) -> kv_pb2.KeyValue | None:
        """The entry of one key, or None if there is none."""
        listing = await self.list_range(key, b"")
        return listing.entries[0] if listing.entries else None

    async def put(self, key: bytes, value: bytes, lease: Lease) -> None:
        """Writes a key for as long as the lease holds. Raises LeaseLost if it does not."""
        request = kv_pb2.PutRequest(key=key, value=value, lease=lease.lease_id)
        await self._anywhere(lambda at, metadata: PUT.call(at.channel, request, metadata, self._limit))

    async def create(self, key: bytes, value: bytes, lease: Lease) -> bool:
        """Writes a key that does not exist, for as long as the lease holds; says whether it did not.

        False also if an answer was lost: then look whose it is. Raises LeaseLost if the lease does not hold.
        """
        absent = kv_pb2.Compare(target=_CREATE, key=key, create_revision=0)
        put = kv_pb2.PutRequest(key=key, value=value, lease=lease.lease_id)
        request = kv_pb2.TxnRequest(compare=[absent], success=[kv_pb2.RequestOp(request_put=put)])
        response = await self._anywhere(lambda at, metadata: TXN.call(at.channel, request, metadata, self._limit))
        return response.succeeded

    async def grant(self, ttl_seconds: int) -> Lease:
        """A new lease. etcd may choose a longer time than was asked for."""
        request = lease_pb2.LeaseGrantRequest(ttl_seconds=ttl_seconds)

        async def attempt(at: Endpoint, metadata: Metadata) -> Lease:
            asked_at = time.monotonic()
            response = await GRANT.call(at.channel, request, metadata, self._limit)
            return Lease(response.id, asked_at + response.ttl_seconds)

        return await self._anywhere(attempt)

    async def renew(self, lease: Lease) -> Lease:
        """The lease with its new deadline. Raises LeaseLost if it was over."""
        request = lease_pb2.LeaseKeepAliveRequest(id=lease.lease_id)

        async def attempt(at: Endpoint, metadata: Metadata) -> Lease:
            asked_at = time.monotonic()
            response = await KEEP_ALIVE.exchange(at.channel, request, metadata, self._limit)
            if response.ttl_seconds <= 0:
                raise LeaseLost(f"lease {lease.lease_id:x}")
            return Lease(lease.lease_id, asked_at + response.ttl_seconds)

        return await self._anywhere(attempt)

    async def revoke(self, lease: Lease) -> None:
        """Ends the lease, and with it its keys. Raises LeaseLost if it was over."""
        request = lease_pb2.LeaseRevokeRequest(id=lease.lease_id)
        await self._anywhere(lambda at, metadata: REVOKE.call(at.channel, request, metadata, self._limit))

    @asynccontextmanager
    async def watch(self, first: bytes, end: bytes, after: Listing) -> AsyncIterator[WatchStream]:
        """What happens to a range after `after` was listed, as one member tells it.

        Raises Unavailable, inside the context too, when that member falls silent, is not in touch with the majority, or
        cannot tell it: then list again, and watch from there. The next watch is on the next member.
        """
        create = watch_pb2.WatchCreateRequest(key=first, range_end=end, start_revision=after.revision + 1)
        at = self._endpoints.current
        try:
            call = WATCH.open(at.channel, await self._token.metadata(at.channel))
            try:
                stream = WatchStream(call, quiet_seconds=self._limit)
                await stream.create(create, after.cluster_id, after.revision)
                yield stream
            finally:
                call.cancel()
        except aio.AioRpcError as error:
            self._endpoints.leave(at)
            raise Unavailable(_describe(at, error)) from error
        except Unavailable:
            self._endpoints.leave(at)
            raise

    async def _anywhere(self, attempt: Callable[[Endpoint, Metadata], Awaitable[Response]]) -> Response:
        """The answer of the first member that gives one, beginning with the current."""
        failures = []
        for _ in range(len(self._endpoints)):
            at = self._endpoints.current
            try:
                return await self._admitted(at, attempt)
            except aio.AioRpcError as error:
                _raise_if_final(at, error)
                failures.append(_describe(at, error))
                self._endpoints.leave(at)
        raise Unavailable("; ".join(failures))

    async def _admitted(self, at: Endpoint, attempt: Callable[[Endpoint, Metadata], Awaitable[Response]]) -> Response:
        """The answer of one member, with a new token if the present one is refused."""
        metadata = await self._token.metadata(at.channel)
        try:
            return await attempt(at, metadata)
        except aio.AioRpcError as error:
            if not self._token.was_refused(error):
                raise
            self._token.forget(metadata)
        return await attempt(at, await self._token.metadata(at.channel))


def _raise_if_final(at: Endpoint, error: aio.AioRpcError) -> None:
    """Raises what another member would answer too."""
    match error.code():
        case StatusCode.PERMISSION_DENIED:
            raise PermissionDenied(_describe(at, error)) from error
        case StatusCode.NOT_FOUND:
            raise LeaseLost(_describe(at, error)) from error


def _describe(at: Endpoint, error: aio.AioRpcError) -> str:
    return f"etcd at {at.address}: {error.code().name}: {error.details()}"
