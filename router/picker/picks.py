"""Chooses the endpoints for a request that passes a gateway.

The request within the HTTP request that passes a gateway: by OpenAI's API, or by gRPC.

The endpoints beside workers, as IP:port: what gateways need, whatever workers advertise.
"""

import asyncio
import ipaddress
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from google.protobuf.message import DecodeError

from baton.errors import BatonError, InvalidRequest, NoWorker
from baton.inference.v1 import generate_pb2, inference_service_pb2
from engine_protocol.roles import completing
from router.config import PickerConfig
from router.openai.chat import ChatCompletionRequest
from router.openai.completions import CompletionRequest
from router.openai.fields import read
from router.openai.json_body import parse
from router.openai.responses import ResponsesRequest
from router.operators.explain import RoutingRequests
from router.picker.messages import Head
from router.placement.placer import Placer
from router.routing.policy import Placement, Progress
from router.telemetry import metrics
from router.workers.cluster import Cluster
from router.workers.handle import WorkerHandle
from runtime.aio import timeout
from runtime.clock import monotonic

_LOOKUP_SECONDS = 1.0
_FRESH_SECONDS = 5.0  # before a name is looked up again


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a router, and a worker beside it."""

    address: str
    worker: WorkerHandle


class Endpoints:
    """Finds the endpoints beside workers. Names of hosts are looked up, and remembered for a while."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, float]] = {}

    async def beside(self, workers: Sequence[WorkerHandle], port: int) -> list[Endpoint]:
        """One for each worker, without those whose name is unknown."""
        found = await asyncio.gather(*(self._address(worker.record.host) for worker in workers))
        return [
            Endpoint(f"[{address}]:{port}" if ":" in address else f"{address}:{port}", worker)
            for address, worker in zip(found, workers, strict=True)
            if address
        ]

    async def _address(self, host: str) -> str:
        """Its IP address; empty if it is not found."""
        if _is_ip(host):
            return host
        known, until = self._known.get(host, ("", 0.0))
        if monotonic() < until:
            return known
        try:
            async with timeout(_LOOKUP_SECONDS):
                found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError, TimeoutError):
            # Also a name that is not found is not looked up for each request.
            found = []
        address = str(found[0][4][0]) if found else ""
        self._known[host] = address, monotonic() + _FRESH_SECONDS
        return address


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


_SERVICE = inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
_FRAME = struct.Struct(">BI")  # of a gRPC message: whether it is compressed, and its length

_Read = Callable[[bytes], generate_pb2.GenerateRequest]


async def read_request(path: str, body: Sequence[bytes]) -> generate_pb2.GenerateRequest | None:
    """The request that the pieces of a body are for a path, read in a thread; None if that path generates nothing.

    Raises a BatonError for a body that the router would refuse.
    """
    reader = _READERS.get(path.partition("?")[0].rstrip("/"))
    return None if reader is None else await asyncio.to_thread(_read, reader, body)


def _read(reader: _Read, body: Sequence[bytes]) -> generate_pb2.GenerateRequest:
    try:
        return reader(b"".join(body))
    except (ValueError, TypeError, OverflowError, RecursionError, DecodeError) as error:
        raise InvalidRequest.of("body", f"has a value that no request can hold: {error}") from None


def _json(kind: Any) -> _Read:
    """Reads a body of OpenAI's API as one of its classes."""

    def requested(body: bytes) -> generate_pb2.GenerateRequest:
        request: generate_pb2.GenerateRequest = read(kind, parse(body)).generate_request("")
        return request

    return requested


def _message(body: bytes) -> bytes:
    """The only message of a gRPC call. Raises InvalidRequest."""
    if len(body) < _FRAME.size:
        raise InvalidRequest.of("body", "is not a gRPC message")
    is_compressed, length = _FRAME.unpack_from(body)
    if is_compressed:
        raise InvalidRequest.of("body", "is a compressed gRPC message")
    if len(body) != _FRAME.size + length:
        raise InvalidRequest.of("body", f"has {len(body) - _FRAME.size} bytes of a gRPC message of {length}")
    return body[_FRAME.size :]


_READERS: Mapping[str, _Read] = {
    "/v1/chat/completions": _json(ChatCompletionRequest),
    "/v1/completions": _json(CompletionRequest),
    "/v1/responses": _json(ResponsesRequest),
    f"/{_SERVICE}/Generate": lambda body: generate_pb2.GenerateRequest.FromString(_message(body)),
    f"/{_SERVICE}/GenerateUnary": lambda body: generate_pb2.GenerateUnaryRequest.FromString(_message(body)).request,
}


log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Pick:
    """Endpoints as IP:port, the best first. Until `close` the request counts as load of the worker beside the best."""

    endpoints: tuple[str, ...]
    placement: Placement[WorkerHandle] | None = None
    _progress: Progress | None = None

    def __post_init__(self) -> None:
        if self.placement is not None:
            self._progress = self.placement.progress
            self.placement.decode.add_load(0)

    def answered(self) -> None:
        """The answer has begun: the policy no longer counts the prompt as waiting."""
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.close()

    def close(self) -> None:
        """The gateway has done with the request."""
        self.answered()
        placement, self.placement = self.placement, None
        if placement is not None:
            placement.decode.remove_load(0)


class EndpointPicker:
    """Picks by the router's own policy. A request that the policy cannot place goes to the least busy worker.

    Its router then says what is wrong with it, in the terms of its API.
    """

    def __init__(self, cluster: Cluster, placer: Placer, requests: RoutingRequests, config: PickerConfig) -> None:
        self._cluster = cluster
        self._placer = placer
        self._requests = requests
        self._config = config
        self._endpoints = Endpoints()

    async def pick(self, head: Head, body: Sequence[bytes]) -> Pick:
        """The endpoints for a request, whose body is in pieces; none if it was not read. Raises NoWorker."""
        able = await self._able(head)
        if not able:
            metrics.PICKS.labels("none").inc()
            raise NoWorker("no worker is ready beside an endpoint that the gateway allows")
        placement = await self._place(head, body, able) if body else None
        metrics.PICKS.labels("load" if placement is None else "policy").inc()
        busy = sorted(able, key=lambda endpoint: endpoint.worker.requests)
        best = [each for each in able if placement is not None and each.worker is placement.decode]
        addresses = dict.fromkeys(each.address for each in [*best, *busy])
        pick = Pick(tuple(addresses)[: 1 + self._config.alternatives], placement)
        log.debug("endpoint picked", path=head.path, endpoints=pick.endpoints, by_policy=placement is not None)
        return pick

    async def _able(self, head: Head) -> list[Endpoint]:
        """Those beside ready workers, of the ones that the gateway allows."""
        ready = [worker for worker in self._cluster.workers if _completes(worker)]
        port = self._config.grpc_port if head.is_grpc else self._config.openai_port
        found = await self._endpoints.beside(ready, port)
        return [each for each in found if head.subset is None or each.address in head.subset]

    async def _place(
        self, head: Head, body: Sequence[bytes], able: Sequence[Endpoint]
    ) -> Placement[WorkerHandle] | None:
        """The policy's choice among these; None if it cannot choose, or not in time."""
        among = {each.worker.record.process for each in able}
        try:
            async with timeout(self._config.pick_seconds):
                request = await read_request(head.path, body)
                if request is None:
                    return None
                routed = await self._requests.make(request)
                return self._placer.place(routed, among)
        except TimeoutError:
            log.warning("no endpoint by policy in time", path=head.path, seconds=self._config.pick_seconds)
        except BatonError as error:
            log.debug("no endpoint by policy", path=head.path, reason=error.reason, error=error.message)
        return None


def _completes(worker: WorkerHandle) -> bool:
    return worker.state == "ready" and bool(completing() & set(worker.record.roles))
