"""etcd's gRPC methods: their paths, with Baton's own messages.

There are no stubs for them, since another distribution's stubs for the same paths may be in the process.

Also the members of an etcd cluster, of which one is in use, and the token for a user's name and password.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from google.protobuf.message import Message
from grpc import StatusCode, aio
from pydantic import SecretStr

from baton.errors import Unauthenticated
from baton.etcd.v1 import auth_pb2, kv_pb2, lease_pb2, watch_pb2
from rpc.auth.tls import TlsConfig
from rpc.channels import open_channel

Metadata: TypeAlias = Sequence[tuple[str, str]]
Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


@dataclass(frozen=True, slots=True)
class UnaryMethod(Generic[Request, Response]):
    """A method with one request and one response."""

    path: str
    request: type[Request]
    response: type[Response]

    async def call(
        self, channel: aio.Channel, request: Request, metadata: Metadata, timeout_seconds: float
    ) -> Response:
        """The response. Raises AioRpcError, also when there is none within `timeout_seconds`."""
        method = channel.unary_unary(self.path, self.request.SerializeToString, self.response.FromString)
        response: Response = await method(request, metadata=metadata, timeout=timeout_seconds)
        return response


@dataclass(frozen=True, slots=True)
class StreamMethod(Generic[Request, Response]):
    """A method with a stream in both directions."""

    path: str
    request: type[Request]
    response: type[Response]

    def open(self, channel: aio.Channel, metadata: Metadata) -> "aio.StreamStreamCall[Request, Response]":
        """A call to write to and read from. The caller cancels it."""
        method = channel.stream_stream(self.path, self.request.SerializeToString, self.response.FromString)
        return method(None, metadata=metadata)

    async def exchange(
        self, channel: aio.Channel, request: Request, metadata: Metadata, timeout_seconds: float
    ) -> Response:
        """The one response to one request. Raises AioRpcError, also when there is none within `timeout_seconds`."""
        method = channel.stream_stream(self.path, self.request.SerializeToString, self.response.FromString)
        call = method(iter([request]), metadata=metadata, timeout=timeout_seconds)
        try:
            response = await call.read()
        finally:
            call.cancel()
        if not isinstance(response, self.response):
            raise aio.AioRpcError(StatusCode.UNAVAILABLE, aio.Metadata(), aio.Metadata(), "no answer", "")
        return response


RANGE = UnaryMethod("/etcdserverpb.KV/Range", kv_pb2.RangeRequest, kv_pb2.RangeResponse)
TXN = UnaryMethod("/etcdserverpb.KV/Txn", kv_pb2.TxnRequest, kv_pb2.TxnResponse)
PUT = UnaryMethod("/etcdserverpb.KV/Put", kv_pb2.PutRequest, kv_pb2.PutResponse)
GRANT = UnaryMethod("/etcdserverpb.Lease/LeaseGrant", lease_pb2.LeaseGrantRequest, lease_pb2.LeaseGrantResponse)
REVOKE = UnaryMethod("/etcdserverpb.Lease/LeaseRevoke", lease_pb2.LeaseRevokeRequest, lease_pb2.LeaseRevokeResponse)
KEEP_ALIVE = StreamMethod(
    "/etcdserverpb.Lease/LeaseKeepAlive", lease_pb2.LeaseKeepAliveRequest, lease_pb2.LeaseKeepAliveResponse
)
WATCH = StreamMethod("/etcdserverpb.Watch/Watch", watch_pb2.WatchRequest, watch_pb2.WatchResponse)
AUTHENTICATE = UnaryMethod(
    "/etcdserverpb.Auth/Authenticate", auth_pb2.AuthenticateRequest, auth_pb2.AuthenticateResponse
)


# etcd closes connections that are pinged while no call runs on them.
_REPLACED_OPTIONS = {"grpc.keepalive_permit_without_calls": 0}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One member, and the channel to it."""

    address: str
    channel: aio.Channel


class Endpoints:
    """One channel for each member, opened on first use and kept until `close`.

    All callers use the same member until one of them leaves it. The channel to it stays open: others may still wait on
    it, and it reconnects by itself.
    """

    def __init__(self, addresses: Sequence[str], tls: TlsConfig | None) -> None:
        self._addresses = tuple(addresses)
        self._tls = tls
        self._opened: dict[str, Endpoint] = {}
        self._position = 0

    def __len__(self) -> int:
        return len(self._addresses)

    @property
    def current(self) -> Endpoint:
        """The member in use."""
        address = self._addresses[self._position]
        if address not in self._opened:
            channel = open_channel(address, self._tls, replaced_options=_REPLACED_OPTIONS)
            self._opened[address] = Endpoint(address, channel)
        return self._opened[address]

    def leave(self, endpoint: Endpoint) -> None:
        """Switches to the next member, unless another caller already did."""
        if endpoint.address == self._addresses[self._position]:
            self._position = (self._position + 1) % len(self._addresses)

    async def close(self) -> None:
        """Closes every channel, and cancels running calls."""
        for endpoint in self._opened.values():
            await endpoint.channel.close(None)


# With this a member without a leader refuses, instead of answering from old data.
_HAS_LEADER = ("hasleader", "true")

# etcd sends these as INVALID_ARGUMENT; a bad or expired token is UNAUTHENTICATED.
_REFUSALS = ("user name is empty", "revision in header is old", "revision of auth store is old")


class EtcdToken:
    """The token of one user, fetched on first use and again after `forget`. Without a user there is none."""

    def __init__(self, username: str, password: SecretStr, timeout_seconds: float) -> None:
        self._username = username
        self._password = password
        self._timeout_seconds = timeout_seconds
        self._metadata: Metadata | None = None if username else (_HAS_LEADER,)

    async def metadata(self, channel: aio.Channel) -> Metadata:
        """The metadata of every call. Raises Unauthenticated if etcd refuses the password."""
        if self._metadata is None:
            self._metadata = await self._authenticate(channel)
        return self._metadata

    def was_refused(self, error: aio.AioRpcError) -> bool:
        """True if a call failed because of its token. Raises Unauthenticated if there is no user to get another for."""
        details = error.details() or ""
        refused = error.code() is StatusCode.UNAUTHENTICATED or any(text in details for text in _REFUSALS)
        if refused and not self._username:
            raise Unauthenticated(f"etcd requires a user and a password: {details}") from error
        return refused

    def forget(self, metadata: Metadata) -> None:
        """Drops the token in `metadata`, unless it was replaced meanwhile."""
        if self._metadata is metadata and self._username:
            self._metadata = None

    async def _authenticate(self, channel: aio.Channel) -> Metadata:
        request = auth_pb2.AuthenticateRequest(name=self._username, password=self._password.get_secret_value())
        try:
            response = await AUTHENTICATE.call(channel, request, (), self._timeout_seconds)
        except aio.AioRpcError as error:
            match error.code():
                case StatusCode.FAILED_PRECONDITION:  # authentication is off
                    return (_HAS_LEADER,)
                case StatusCode.INVALID_ARGUMENT | StatusCode.UNAUTHENTICATED:
                    raise Unauthenticated(f"etcd refuses user {self._username}: {error.details()}") from error
            raise
        return (_HAS_LEADER, ("token", response.token))
