"""etcd's gRPC methods: their paths, with Baton's own messages.

There are no stubs for them, since another distribution's stubs for the same paths may be in the process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from google.protobuf.message import Message
from grpc import StatusCode, aio

from baton.etcd.v1 import auth_pb2, kv_pb2, lease_pb2, watch_pb2

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
