"""Envoy's external processing service, as the endpoint picker of the Gateway API Inference Extension.

The endpoint picker's own server, beside the router's.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton.envoy import ext_proc_pb2 as pb
from baton.envoy import ext_proc_pb2_grpc
from baton.errors import BatonError, DeadlineExceeded, InvalidRequest
from router.config import PickerConfig, RouterConfig
from router.picker.messages import Head, metadata, named, refused, streamed
from router.picker.picks import EndpointPicker, Pick
from router.workers.cluster import Cluster
from rpc.health import Health
from rpc.server import ServerOptions, Service, serve
from runtime.aio import TaskGroup, timeout
from runtime.lasting import lasting

NAME: str = pb.DESCRIPTOR.services_by_name["ExternalProcessor"].full_name

Write = Callable[[pb.ProcessingResponse], Awaitable[None]]


class ExternalProcessorServicer(ext_proc_pb2_grpc.ExternalProcessorServicer):
    """Names the endpoints of each HTTP request. `longest_seconds` is how long one may take altogether."""

    def __init__(self, picker: EndpointPicker, config: PickerConfig, longest_seconds: float) -> None:
        self._picker = picker
        self._config = config
        self._longest_seconds = longest_seconds

    async def Process(self, messages: AsyncIterator[pb.ProcessingRequest], context: Any) -> None:  # type: ignore[override]
        exchange = Exchange(self._picker, self._config)
        await exchange.run(messages, context.write, self._longest_seconds)


class Exchange:
    """One HTTP request that passes the gateway.

    Where the body may be waited for (buffered, or in full duplex) the endpoints are named once it is complete, and else
    from the head alone. In full duplex the body goes back to the gateway as it came.
    """

    def __init__(self, picker: EndpointPicker, config: PickerConfig) -> None:
        self._picker = picker
        self._config = config
        self._head: Head | None = None
        self._body: list[pb.HttpBody] = []
        self._size = 0
        self._pick: Pick | None = None
        self._is_decided = False

    async def run(self, messages: AsyncIterator[pb.ProcessingRequest], write: Write, longest_seconds: float) -> None:
        """Answers every message of the stream. Raises InvalidRequest, and DeadlineExceeded if the gateway stalls."""
        was_decided = False
        try:
            async with timeout(self._config.body_seconds) as waiting:
                async for message in messages:
                    for response in await self._answer(message):
                        await write(response)
                    if self._is_decided and not was_decided:
                        was_decided = True
                        waiting.reschedule(asyncio.get_running_loop().time() + longest_seconds)
        except TimeoutError:
            raise DeadlineExceeded(_late(self._config, longest_seconds, is_decided=self._is_decided)) from None
        finally:
            if self._pick is not None:
                self._pick.close()

    async def _answer(self, message: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        kind = message.WhichOneof("request")
        if kind == "request_headers":
            return await self._begin(Head.read(message))
        if self._head is None:
            raise InvalidRequest.of("request", f"is {kind or 'empty'} before any request_headers")
        match kind:
            case "request_body":
                return await self._add_body(self._head, message.request_body)
            case "request_trailers":
                end = pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
                # Without any body; or the end of one in full duplex, whose head still waits for its answer.
                waits = not self._is_decided and self._head.request_mode == pb.FULL_DUPLEX_STREAMED
                return [*(await self._decide(self._head) if waits else []), end]
            case "response_headers":
                if self._pick is not None:
                    self._pick.answered()
                return [pb.ProcessingResponse(response_headers=pb.HeadersResponse())]
            case "response_body":
                return [pb.ProcessingResponse(response_body=_passed(message.response_body, self._head.response_mode))]
            case "response_trailers":
                return [pb.ProcessingResponse(response_trailers=pb.TrailersResponse())]
        raise InvalidRequest.of("request", "is empty, or of a kind that is unknown here")

    async def _begin(self, head: Head) -> list[pb.ProcessingResponse]:
        if self._head is not None:
            raise InvalidRequest.of("request", "is request_headers for the second time")
        self._head = head
        if head.has_body and head.request_mode == pb.FULL_DUPLEX_STREAMED:
            return []
        if head.has_body and head.request_mode == pb.BUFFERED:
            return [pb.ProcessingResponse(request_headers=pb.HeadersResponse())]
        return await self._decide(head)

    async def _add_body(self, head: Head, body: pb.HttpBody) -> list[pb.ProcessingResponse]:
        if self._is_decided:
            return [pb.ProcessingResponse(request_body=_passed(body, head.request_mode))]
        self._body.append(body)
        self._size += len(body.body)
        is_whole = body.end_of_stream or head.request_mode == pb.BUFFERED
        if not is_whole and self._size <= self._config.max_body_bytes:
            return []
        return await self._decide(head)

    async def _decide(self, head: Head) -> list[pb.ProcessingResponse]:
        """The answer that names the endpoints, and the body so far if the gateway needs it back."""
        self._is_decided = True
        try:
            self._pick = await self._picker.pick(head, self._readable())
        except BatonError as error:
            if self._config.failure == "closed":
                return [refused(error, is_grpc=head.is_grpc)]
        endpoints = self._pick.endpoints if self._pick else ()
        body, self._body = self._body, []
        answer = pb.ProcessingResponse(dynamic_metadata=metadata(endpoints))
        if body and head.request_mode != pb.FULL_DUPLEX_STREAMED:
            answer.request_body.response.CopyFrom(named(endpoints))
            return [answer]
        answer.request_headers.response.CopyFrom(named(endpoints))
        return [answer, *(pb.ProcessingResponse(request_body=streamed(piece)) for piece in body)]

    def _readable(self) -> list[bytes]:
        """The whole body, in pieces; none if it is larger than what is read."""
        return [each.body for each in self._body] if self._size <= self._config.max_body_bytes else []


def _passed(body: pb.HttpBody, mode: int) -> pb.BodyResponse:
    return streamed(body) if mode == pb.FULL_DUPLEX_STREAMED else pb.BodyResponse()


def _late(config: PickerConfig, longest_seconds: float, *, is_decided: bool) -> str:
    if is_decided:
        return f"the request that passes the gateway took longer than {longest_seconds:g} s"
    return f"the gateway did not send the whole request within {config.body_seconds:g} s"


# The services whose health the protocol of endpoint pickers has, beside its own.
LIVENESS, READINESS = "liveness", "readiness"


@dataclass(frozen=True, slots=True)
class PickerServer:
    """A picker that is listening. `stop` begins its drain, which the end of its context waits for."""

    address: str
    stop: Callable[[], None]


@asynccontextmanager
async def serve_picker(
    config: RouterConfig, picker: EndpointPicker, cluster: Cluster, *, shares_port: bool
) -> AsyncGenerator[PickerServer, None]:
    """Serves the picker until the context is left. With `picker.tls.ca` callers need certificates.

    Raises ConfigError if it cannot listen.
    """
    health, stopping = Health(), asyncio.Event()
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    servicer = ExternalProcessorServicer(picker, config.picker, config.limits.max_timeout_seconds)

    async def host() -> None:
        serving = serve(
            config.picker.listen,
            [Service(NAME, ext_proc_pb2_grpc.add_ExternalProcessorServicer_to_server, servicer)],
            health=health,
            announce_seconds=config.announce_seconds,
            drain_seconds=config.drain_seconds,
            options=ServerOptions(tls=config.picker.tls, kind=config.server, shares_port=shares_port),
        )
        async with serving as server:
            started.set_result(server.address)
            await stopping.wait()

    async with TaskGroup() as group:
        reporting = group.create_task(lasting("health", partial(_report_health, cluster, health)))
        group.create_task(host())
        try:
            yield PickerServer(await started, stopping.set)
        finally:
            stopping.set()
            reporting.cancel()


async def _report_health(cluster: Cluster, health: Health) -> None:
    health.set(LIVENESS, True)
    async for ready in cluster.readiness():
        for service in ("", READINESS, NAME):
            health.set(service, ready)
