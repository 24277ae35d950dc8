"""The clients of the router: requests of each kind, broken off in each way, and connections that break the rules.

A kind's outcome is the status that its client got, or what became of its connection. Each kind names the outcomes that
are right.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hyperframe.frame import HeadersFrame, RstStreamFrame
from support.http2.fuzz import conversation, mutated, wire
from support.http2.peer import peer_of, silent_peer

from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc
from benchmarks.soak.cluster import MODEL
from rpc.channels import open_channel
from runtime.aio import timeout

_GENERATE = "/baton.inference.v1.InferenceService/Generate"
_CHANNELS = 8
_TOKENS = 16
_PATIENCE_SECONDS = 60.0
# A separate connection to the same address, and not one that another channel has.
_OWN_CONNECTION = {"grpc.use_local_subchannel_pool": 1}

Outcome = str
Act = Callable[["Clients", random.Random], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True)
class Kind:
    """One thing that a client does: its share of all that is done, and the outcomes that are right."""

    name: str
    share: float
    act: Act
    right: frozenset[Outcome]


@dataclass(slots=True)
class Tally:
    """The count of each outcome of each kind."""

    outcomes: Counter[tuple[str, Outcome]] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """All that was done."""
        return self.outcomes.total()

    def wrong(self) -> dict[tuple[str, Outcome], int]:
        """The outcomes that should not have come."""
        right = {kind.name: kind.right for kind in KINDS}
        return {key: count for key, count in self.outcomes.items() if key[1] not in right[key[0]]}


class Clients:
    """Well-behaved connections to one router: `async with Clients(address) as clients: ...`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.port = int(address.rpartition(":")[2])
        self.channels: Sequence[aio.Channel] = ()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Clients":
        self.channels = [await self._stack.enter_async_context(self.open()) for _ in range(_CHANNELS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def open(self) -> aio.Channel:
        """A channel with a connection of its own."""
        return open_channel(self.address, replaced_options=_OWN_CONNECTION)

    def stub(self, source: random.Random) -> inference_service_pb2_grpc.InferenceServiceStub:
        """One of the channels."""
        return inference_service_pb2_grpc.InferenceServiceStub(source.choice(self.channels))


async def run(address: str, requests: int, lanes: int, source: random.Random, tally: Tally) -> None:
    """Does so many things, one after another in each lane."""
    shares = [kind.share for kind in KINDS]
    todo = iter(source.choices(KINDS, shares, k=requests))

    async def lane(clients: Clients, own: random.Random) -> None:
        for kind in todo:
            async with timeout(_PATIENCE_SECONDS):
                tally.outcomes[kind.name, await kind.act(clients, own)] += 1

    async with Clients(address) as clients:
        await asyncio.gather(*(lane(clients, random.Random(source.random())) for _ in range(lanes)))


def _request(source: random.Random, tokens: int = _TOKENS, model: str = MODEL) -> generate_pb2.GenerateRequest:
    request = generate_pb2.GenerateRequest(model=model, prompt=f"{source.random()}" + "x" * source.randrange(400))
    request.stopping.max_tokens = tokens
    return request


def _status(error: aio.AioRpcError) -> Outcome:
    code: StatusCode = error.code()
    return code.name


async def _read(stub: inference_service_pb2_grpc.InferenceServiceStub, request: object, **more: object) -> Outcome:
    try:
        async for _ in stub.Generate(request, **more):  # type: ignore[arg-type]
            pass
    except aio.AioRpcError as error:
        return _status(error)
    return "OK"


# Clients that keep to the rules.


async def _stream(clients: Clients, source: random.Random) -> Outcome:
    return await _read(clients.stub(source), _request(source))


async def _unary(clients: Clients, source: random.Random) -> Outcome:
    request = generate_pb2.GenerateUnaryRequest(request=_request(source))
    try:
        await clients.stub(source).GenerateUnary(request)
    except aio.AioRpcError as error:
        return _status(error)
    return "OK"


async def _cancel(clients: Clients, source: random.Random) -> Outcome:
    call = clients.stub(source).Generate(_request(source, tokens=4000))
    for _ in range(source.randrange(3)):
        await call.read()
    call.cancel()
    return (await call.code()).name


async def _deadline(clients: Clients, source: random.Random) -> Outcome:
    return await _read(clients.stub(source), _request(source, tokens=4000), timeout=source.choice((0.005, 0.02, 0.05)))


async def _long(clients: Clients, source: random.Random) -> Outcome:
    return await _read(clients.stub(source), _request(source, tokens=500))


async def _metadata(clients: Clients, source: random.Random) -> Outcome:
    sent = [(f"x-{number}", "v" * 700) for number in range(10)] + [("x-data-bin", source.randbytes(1000))]
    return await _read(clients.stub(source), _request(source), metadata=sent)


async def _too_much_metadata(clients: Clients, source: random.Random) -> Outcome:
    sent = [(f"x-{number}", "v" * 1000) for number in range(20)]
    async with clients.open() as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        return await _read(stub, _request(source), metadata=sent)


async def _large(clients: Clients, source: random.Random) -> Outcome:
    request = _request(source, model="x")
    request.prompt = "large " * 50_000
    return await _read(clients.stub(source), request)


async def _unknown_model(clients: Clients, source: random.Random) -> Outcome:
    return await _read(clients.stub(source), _request(source, model="unknown"))


async def _reconnect(clients: Clients, source: random.Random) -> Outcome:
    async with clients.open() as channel:
        return await _read(inference_service_pb2_grpc.InferenceServiceStub(channel), _request(source))


async def _leave(clients: Clients, source: random.Random) -> Outcome:
    """The connection is closed while its calls run."""
    channel = clients.open()
    stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
    calls = [stub.Generate(_request(source, tokens=4000)) for _ in range(3)]
    await calls[0].read()
    await channel.close()
    return "left"


async def _read_slowly(clients: Clients, source: random.Random) -> Outcome:
    try:
        async for _ in clients.stub(source).Generate(_request(source, tokens=64)):
            await asyncio.sleep(0.02)
    except aio.AioRpcError as error:
        return _status(error)
    return "OK"


async def _watch_health(clients: Clients, source: random.Random) -> Outcome:
    call = health_pb2_grpc.HealthStub(source.choice(clients.channels)).Watch(health_pb2.HealthCheckRequest())
    await call.read()
    call.cancel()
    return (await call.code()).name


# Connections that break the rules, or break.


def _head() -> list[tuple[str, str]]:
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", _GENERATE),
        (":authority", "soak"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]


def _body(source: random.Random) -> bytes:
    content = _request(source, tokens=4000).SerializeToString()
    return b"\0" + len(content).to_bytes(4, "big") + content


def _data(stream_id: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + b"\0\1" + stream_id.to_bytes(4, "big") + body


async def _reset(clients: Clients, source: random.Random) -> Outcome:
    """Calls that are reset as soon as they are sent, or when they have begun."""
    async with peer_of(clients.port) as peer:
        for stream_id in range(1, 41, 2):
            await peer.send(HeadersFrame(stream_id, peer.block(_head()), flags=["END_HEADERS"]))
            await peer.send(_data(stream_id, _body(source)))
            if source.random() < 0.5:
                await peer.ping()
            await peer.send(RstStreamFrame(stream_id, error_code=8))
        await peer.ping()
    return "served"


async def _read_nothing(clients: Clients, source: random.Random) -> Outcome:
    """No window is opened for the answers, until the router has had enough, or the connection goes."""
    async with peer_of(clients.port, INITIAL_WINDOW_SIZE=0) as peer:
        for stream_id in range(1, 11, 2):
            await peer.send(HeadersFrame(stream_id, peer.block(_head()), flags=["END_HEADERS"]))
            await peer.send(_data(stream_id, _body(source)))
        if source.random() < 0.1:
            await peer.until(lambda: any(answer.reset is not None for answer in peer.answers.values()))
            return "ended"
        await peer.ping()
    return "left"


async def _half_a_frame(clients: Clients, source: random.Random) -> Outcome:
    """The connection is gone in the midst of a frame, a header block or a message."""
    async with peer_of(clients.port) as peer:
        sent = HeadersFrame(1, peer.block(_head()), flags=["END_HEADERS"]).serialize() + _data(1, _body(source))
        await peer.send(sent[: source.randrange(1, len(sent))])
        if source.random() < 0.5:
            await peer.until(lambda: bool(peer.frames))
    return "left"


async def _another_protocol(clients: Clients, source: random.Random) -> Outcome:
    async with silent_peer(clients.port) as peer:
        await peer.send(source.choice((b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", source.randbytes(200))))
        await peer.closed()
    return "ended"


async def _mutated_frames(clients: Clients, source: random.Random) -> Outcome:
    async with silent_peer(clients.port) as peer:
        await peer.send(wire(mutated(source, conversation(source, source.randrange(1, 6)))))
        await asyncio.sleep(0.01)
    return "left"


_OK = frozenset({"OK"})
KINDS: Sequence[Kind] = (
    Kind("stream of 16 tokens", 0.50, _stream, _OK),
    Kind("unary call", 0.10, _unary, _OK),
    Kind("stream of 500 tokens", 0.02, _long, _OK),
    Kind("stream that is cancelled", 0.10, _cancel, frozenset({"CANCELLED"})),
    # Admission refuses a request that cannot be in time.
    Kind("stream with a short deadline", 0.05, _deadline, frozenset({"DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"})),
    Kind("8 KB of metadata", 0.05, _metadata, _OK),
    Kind("20 KB of metadata", 0.01, _too_much_metadata, frozenset({"RESOURCE_EXHAUSTED"})),
    Kind("300 KB request for an unknown model", 0.01, _large, frozenset({"NOT_FOUND"})),
    Kind("unknown model", 0.02, _unknown_model, frozenset({"NOT_FOUND"})),
    Kind("request on a new connection", 0.04, _reconnect, _OK),
    Kind("connection closed while 3 streams run", 0.02, _leave, frozenset({"left"})),
    Kind("slow reader", 0.01, _read_slowly, _OK),
    Kind("watch of health", 0.02, _watch_health, frozenset({"CANCELLED"})),
    Kind("20 streams that are reset", 0.01, _reset, frozenset({"served"})),
    Kind("5 streams with no window", 0.01, _read_nothing, frozenset({"ended", "left"})),
    Kind("connection gone within a frame", 0.01, _half_a_frame, frozenset({"left"})),
    Kind("another protocol", 0.01, _another_protocol, frozenset({"ended"})),
    Kind("mutated frames", 0.01, _mutated_frames, frozenset({"left"})),
)
