"""The etcd calls that discovery needs, each with a deadline, on the first member that answers; a watch on one."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from grpc import StatusCode, aio
from typing_extensions import Self

from baton.errors import BatonError, PermissionDenied, Unavailable
from baton.etcd.v1 import kv_pb2, lease_pb2, watch_pb2
from discovery.etcd.config import EtcdConfig
from discovery.etcd.methods import (
    GRANT,
    KEEP_ALIVE,
    PUT,
    RANGE,
    REVOKE,
    TXN,
    WATCH,
    Endpoint,
    Endpoints,
    EtcdToken,
    Metadata,
)
from runtime.aio import timeout
from runtime.clock import monotonic

Response = TypeVar("Response")

_CREATE = 1  # etcd's Compare.CompareTarget
# Of one response: however large they are, it is not over the limit of a message. etcd takes 1.5 MiB of a key.
_PAGE_KEYS = 32


class LeaseLost(BatonError):
    """etcd does not know the lease, or no longer."""


@dataclass(frozen=True, slots=True)
class EtcdLease:
    """A lease that etcd granted. `deadline` is of time.monotonic, and never later than etcd's own.

    It is counted from before the request was sent.
    """

    lease_id: int
    deadline: float

    @property
    def holds(self) -> bool:
        """True if etcd still keeps it, as far as this process knows."""
        return monotonic() < self.deadline


@dataclass(frozen=True, slots=True)
class Listing:
    """The keys of a range at one revision of one cluster."""

    cluster_id: int
    revision: int
    entries: tuple[kv_pb2.KeyValue, ...]


class WatchStream:
    """The events of a watch. A member that is silent for `quiet_seconds` is probed, and has as long to answer.

    Every method raises Unavailable when the watch cannot continue, and AioRpcError when the stream fails. The caller
    owns `call`, and cancels it.
    """

    def __init__(
        self, call: "aio.StreamStreamCall[watch_pb2.WatchRequest, watch_pb2.WatchResponse]", *, quiet_seconds: float
    ) -> None:
        self._call = call
        self._quiet_seconds = quiet_seconds

    async def create(self, request: watch_pb2.WatchCreateRequest, cluster_id: int, revision: int) -> None:
        """Starts the watch after `revision` of the cluster that was listed.

        A member at an earlier revision may have lost its data: it would be silent until it reaches the revision again,
        and the events before that would be missed.
        """
        await self._write(watch_pb2.WatchRequest(create_request=request))
        created = await self._read()
        _raise_if_canceled(created)
        if created.header.cluster_id != cluster_id:
            raise Unavailable("the member belongs to a different cluster than the one that was listed")
        if created.header.revision < revision:
            raise Unavailable(f"the member is at revision {created.header.revision}, behind the listed {revision}")

    async def events(self) -> AsyncIterator[Sequence[watch_pb2.Event]]:
        """Yields the events, in order. A response without events only shows that the member is alive."""
        while True:
            response = await self._read()
            _raise_if_canceled(response)
            if response.events:
                yield response.events

    async def _read(self) -> watch_pb2.WatchResponse:
        reading = asyncio.ensure_future(self._call.read())
        try:
            if not await self._done(reading):
                await self._write(watch_pb2.WatchRequest(progress_request=watch_pb2.WatchProgressRequest()))
                if not await self._done(reading):
                    raise Unavailable(f"the watch was silent for {2 * self._quiet_seconds:g} s")
            response = reading.result()
        finally:
            reading.cancel()
        if not isinstance(response, watch_pb2.WatchResponse):
            raise Unavailable("etcd ended the watch")
        return response

    async def _done(self, reading: "asyncio.Future[object]") -> bool:
        # Not wait_for: cancelling a read cancels the whole call.
        done, _ = await asyncio.wait({reading}, timeout=self._quiet_seconds)
        return bool(done)

    async def _write(self, request: watch_pb2.WatchRequest) -> None:
        try:
            async with timeout(self._quiet_seconds):
                await self._call.write(request)
        except TimeoutError:
            raise Unavailable(f"the watch did not accept a request for {self._quiet_seconds:g} s") from None
        except asyncio.InvalidStateError as error:
            raise Unavailable("etcd ended the watch") from error


def _raise_if_canceled(response: watch_pb2.WatchResponse) -> None:
    if response.compact_revision:
        raise Unavailable(f"the watch's start was compacted, up to revision {response.compact_revision}")
    if response.canceled:
        raise Unavailable(f"etcd cancelled the watch: {response.cancel_reason}")


class EtcdClient:
    """A client of one etcd cluster: `async with EtcdClient(config) as client: ...`.

    Every method raises Unavailable when no member has answered within its deadline, Unauthenticated and
    PermissionDenied when etcd refuses this user.
    """

    def __init__(self, config: EtcdConfig) -> None:
        self._limit = config.call_timeout_seconds
        self._endpoints = Endpoints(config.addresses, config.tls)
        self._token = EtcdToken(config.username, config.password, config.call_timeout_seconds)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._endpoints.close()

    async def list_range(self, first: bytes, end: bytes) -> Listing:
        """All keys in [first, end), as the majority of members had them when the first one was read."""
        response = await self._range(kv_pb2.RangeRequest(key=first, range_end=end, limit=_PAGE_KEYS))
        header, entries = response.header, list(response.kvs)
        while response.more:
            after, at = entries[-1].key + b"\0", header.revision
            request = kv_pb2.RangeRequest(key=after, range_end=end, limit=_PAGE_KEYS, revision=at)
            response = await self._range(request)
            entries += response.kvs
        return Listing(header.cluster_id, header.revision, tuple(entries))

    async def _range(self, request: kv_pb2.RangeRequest) -> kv_pb2.RangeResponse:
        return await self._on_any_member(lambda at, metadata: RANGE.call(at.channel, request, metadata, self._limit))

    async def get(self, key: bytes) -> kv_pb2.KeyValue | None:
        """The entry of one key, or None if there is none."""
        listing = await self.list_range(key, b"")
        return listing.entries[0] if listing.entries else None

    async def put(self, key: bytes, value: bytes, lease: EtcdLease) -> None:
        """Writes a key under a lease. Raises LeaseLost if the lease is over."""
        request = kv_pb2.PutRequest(key=key, value=value, lease=lease.lease_id)
        await self._on_any_member(lambda at, metadata: PUT.call(at.channel, request, metadata, self._limit))

    async def create(self, key: bytes, value: bytes, lease: EtcdLease) -> bool:
        """Writes a key under a lease unless it exists; whether it was written.

        False also if an earlier response was lost: then check whose key it is. Raises LeaseLost if the lease is over.
        """
        absent = kv_pb2.Compare(target=_CREATE, key=key, create_revision=0)
        put = kv_pb2.PutRequest(key=key, value=value, lease=lease.lease_id)
        request = kv_pb2.TxnRequest(compare=[absent], success=[kv_pb2.RequestOp(request_put=put)])
        response = await self._on_any_member(lambda at, metadata: TXN.call(at.channel, request, metadata, self._limit))
        return response.succeeded

    async def grant(self, ttl_seconds: int) -> EtcdLease:
        """A new lease. etcd may grant a longer time than requested."""
        request = lease_pb2.LeaseGrantRequest(ttl_seconds=ttl_seconds)

        async def attempt(at: Endpoint, metadata: Metadata) -> EtcdLease:
            asked_at = monotonic()
            response = await GRANT.call(at.channel, request, metadata, self._limit)
            return EtcdLease(response.id, asked_at + response.ttl_seconds)

        return await self._on_any_member(attempt)

    async def renew(self, lease: EtcdLease) -> EtcdLease:
        """The lease with its new deadline. Raises LeaseLost if it was over."""
        request = lease_pb2.LeaseKeepAliveRequest(id=lease.lease_id)

        async def attempt(at: Endpoint, metadata: Metadata) -> EtcdLease:
            asked_at = monotonic()
            response = await KEEP_ALIVE.exchange(at.channel, request, metadata, self._limit)
            if response.ttl_seconds <= 0:
                raise LeaseLost(f"lease {lease.lease_id:x}")
            return EtcdLease(lease.lease_id, asked_at + response.ttl_seconds)

        return await self._on_any_member(attempt)

    async def revoke(self, lease: EtcdLease) -> None:
        """Ends the lease, and with it its keys. Raises LeaseLost if it was over."""
        request = lease_pb2.LeaseRevokeRequest(id=lease.lease_id)
        await self._on_any_member(lambda at, metadata: REVOKE.call(at.channel, request, metadata, self._limit))

    @asynccontextmanager
    async def watch(self, first: bytes, end: bytes, after: Listing) -> AsyncIterator[WatchStream]:
        """The changes of a range since `after` was listed, from one member.

        Raises Unavailable, inside the context too, when that member falls silent, has lost the majority, or no longer
        has these changes: then list again, and watch from there. The next watch is on the next member.
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

    async def _on_any_member(self, attempt: Callable[[Endpoint, Metadata], Awaitable[Response]]) -> Response:
        """The response of the first member that answers, starting with the one in use."""
        failures = []
        for _ in range(len(self._endpoints)):
            at = self._endpoints.current
            try:
                return await self._authenticated(at, attempt)
            except aio.AioRpcError as error:
                _raise_if_final(at, error)
                failures.append(_describe(at, error))
                self._endpoints.leave(at)
        raise Unavailable("; ".join(failures))

    async def _authenticated(
        self, at: Endpoint, attempt: Callable[[Endpoint, Metadata], Awaitable[Response]]
    ) -> Response:
        """The response of one member, with a new token if the current one is refused."""
        metadata = await self._token.metadata(at.channel)
        try:
            return await attempt(at, metadata)
        except aio.AioRpcError as error:
            if not self._token.was_refused(error):
                raise
            self._token.forget(metadata)
        return await attempt(at, await self._token.metadata(at.channel))


def _raise_if_final(at: Endpoint, error: aio.AioRpcError) -> None:
    """Raises an error that every other member would answer too."""
    match error.code():
        case StatusCode.PERMISSION_DENIED:
            raise PermissionDenied(_describe(at, error)) from error
        case StatusCode.NOT_FOUND:
            raise LeaseLost(_describe(at, error)) from error


def _describe(at: Endpoint, error: aio.AioRpcError) -> str:
    return f"etcd at {at.address}: {error.code().name}: {error.details()}"
