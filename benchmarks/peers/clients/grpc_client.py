"""A client of Baton's routers and workers that costs less than what it measures: HTTP/2 frames, read as they come.

It opens all windows once, sends header blocks without any state, and parses only the messages.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Final, cast

from baton.engine.v1 import decode_pb2, handoff_pb2, prefill_pb2, prompt_pb2
from baton.inference.v1 import generate_pb2
from baton_http2.wire import frames as h2
from baton_http2.wire.hpack import HpackDecoder, literal
from benchmarks.peers.clients.load import PROMPT_TOKENS, PROMPTS, Answer

CONNECTIONS: Final = 8
_GENERATE: Final = "/baton.inference.v1.InferenceService/Generate"
_PREFILL: Final = "/baton.engine.v1.PrefillService/Prefill"
_DECODE: Final = "/baton.engine.v1.DecodeService/Decode"
_OPENED: Final = h2.MAX_WINDOW - h2.DEFAULT_WINDOW

# Takes a message, and the time at which it came.
Take = Callable[[bytes, float], None]


class Call:
    """One call: its messages are given to `take`; `done` ends with it."""

    def __init__(self, take: Take) -> None:
        self._take = take
        self._rest = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def receive(self, data: bytes, now: float) -> None:
        """The content of a DATA frame."""
        if self._rest:
            data = self._rest + data
        at = 0
        while len(data) - at >= h2.PREFIX.size:
            end = at + h2.PREFIX.size + h2.U32.unpack_from(data, at + 1)[0]
            if end > len(data):
                break
            self._take(data[at + h2.PREFIX.size : end], now)
            at = end
        self._rest = data[at:]

    def fail(self, reason: str) -> None:
        """It has not ended well."""
        if not self.done.done():
            self.done.set_exception(ConnectionError(reason))


class Connection(asyncio.Protocol):
    """One connection to a gRPC server, without TLS."""

    def __init__(self, address: str) -> None:
        self._authority = address.encode()
        self._ids = count(1, 2)
        self._calls: dict[int, Call] = {}
        self._reads: list[tuple[bytes, float]] = []
        self._rest = b""
        self._window = h2.DEFAULT_WINDOW
        self._waiting: deque[bytes] = deque()
        self._heads = HpackDecoder(65_536)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._loop = asyncio.get_running_loop()
        own = h2.settings({h2.ENABLE_PUSH: 0, h2.INITIAL_WINDOW_SIZE: h2.MAX_WINDOW})
        self._transport.write(h2.PREFACE + own + h2.window_update(0, _OPENED))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection was lost: {exc}")

    def close(self) -> None:
        """Closes it."""
        self._transport.close()

    async def call(self, path: str, message: bytes, take: Take) -> None:
        """Sends a message, and waits for the end. Raises ConnectionError if the status is not OK."""
        stream_id, call = next(self._ids), Call(take)
        self._calls[stream_id] = call
        names = (b":method", b":scheme", b":path", b":authority", b"te", b"content-type")
        values = (b"POST", b"http", path.encode(), self._authority, b"trailers", b"application/grpc")
        block = b"".join(map(literal, names, values))
        body = h2.PREFIX.pack(0, len(message)) + message
        head = h2.header_block(stream_id, block, h2.DEFAULT_MAX_FRAME, end_stream=False)
        self._transport.write(head)
        self._waiting.append(h2.frame(h2.DATA, h2.END_STREAM, stream_id, body))
        self._send()
        try:
            await call.done
        finally:
            if self._calls.pop(stream_id, None):
                self._transport.write(h2.rst_stream(stream_id, h2.CANCEL))

    def _send(self) -> None:
        """Sends what the connection's window has room for. A prompt is shorter than a stream's."""
        while self._waiting and len(self._waiting[0]) <= self._window:
            frame = self._waiting.popleft()
            self._window -= len(frame) - h2.FRAME_HEADER_BYTES
            self._transport.write(frame)

    def data_received(self, data: bytes) -> None:
        if not self._reads:
            # What other connections have brought in this turn is to have its time before any of it is parsed.
            self._loop.call_soon(self._parse_reads)
        self._reads.append((data, time.perf_counter()))

    def _parse_reads(self) -> None:
        reads, self._reads = self._reads, []
        for data, now in reads:
            self._parse(data, now)

    def _parse(self, data: bytes, now: float) -> None:
        if self._rest:
            data = self._rest + data
        at = 0
        while len(data) - at >= h2.FRAME_HEADER_BYTES:
            head, flags, stream_id = h2.HEADER.unpack_from(data, at)
            end = at + h2.FRAME_HEADER_BYTES + (head >> 8)
            if end > len(data):
                break
            payload = data[at + h2.FRAME_HEADER_BYTES : end]
            if head & 0xFF == h2.DATA:
                if call := self._calls.get(stream_id):
                    call.receive(payload, now)
            else:
                self._control(head & 0xFF, flags, stream_id, payload)
            at = end
        self._rest = data[at:]

    def _control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == h2.HEADERS:
            self._head(flags, stream_id, payload)
        elif kind == h2.WINDOW_UPDATE and not stream_id:
            self._window += h2.U32.unpack(payload)[0]
            self._send()
        elif kind in (h2.SETTINGS, h2.PING) and not flags & h2.ACK:
            self._transport.write(h2.frame(kind, h2.ACK, 0, payload if kind == h2.PING else b""))
        elif kind == h2.RST_STREAM and stream_id in self._calls:
            self._calls.pop(stream_id).fail(f"the stream was reset, code {h2.U32.unpack(payload)[0]}")
        elif kind == h2.GOAWAY:
            self._fail(f"the server goes away: {payload[8:]!r}")

    def _head(self, flags: int, stream_id: int, payload: bytes) -> None:
        fields = dict(self._heads.decode(payload))
        if not flags & h2.END_STREAM or stream_id not in self._calls:
            return
        call = self._calls.pop(stream_id)
        if fields.get(b"grpc-status") == b"0":
            call.done.set_result(None)
        else:
            call.fail(f"status {fields.get(b'grpc-status')!r}: {fields.get(b'grpc-message')!r}")

    def _fail(self, reason: str) -> None:
        for call in self._calls.values():
            call.fail(reason)
        self._calls.clear()


class Connections:
    """Connections to one server: so many that calls share, or, with 0, one for each call, kept for a later one."""

    def __init__(self, address: str, number: int) -> None:
        self._address = address
        self._number = number
        self._turn = count()
        self._opening: asyncio.Future[list[Connection]] | None = None
        self._idle: list[Connection] = []
        self._opened: list[Connection] = []

    async def take(self) -> Connection:
        """The connection of a call, to be given back."""
        if not self._number:
            return self._idle.pop() if self._idle else await self._open()
        if not self._opening:
            self._opening = asyncio.gather(*(self._open() for _ in range(self._number)))
        return (await self._opening)[next(self._turn) % self._number]

    def give_back(self, connection: Connection) -> None:
        """The call is over."""
        if not self._number:
            self._idle.append(connection)

    def close(self) -> None:
        """Closes all of them."""
        for connection in self._opened:
            connection.close()

    async def _open(self) -> Connection:
        host, _, port = self._address.rpartition(":")
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Connection(self._address), host, int(port))
        self._opened.append(connection)
        return connection


class GrpcClient:
    """Sends a router its load. See LoadClient."""

    def __init__(self, address: str, connections: int = CONNECTIONS, prompts: Iterator[str] = PROMPTS) -> None:
        self._connections = Connections(address, connections)
        self._prompts = prompts

    async def answer(self, model: str, tokens: int) -> Answer:
        request = generate_pb2.GenerateRequest(model=model, prompt=next(self._prompts))
        request.stopping.max_tokens = tokens
        connection = await self._connections.take()
        answer = Answer(tokens)

        def take(message: bytes, now: float) -> None:
            response = generate_pb2.GenerateResponse.FromString(message)
            if response.HasField("token"):
                answer.note(now, len(response.token.token_ids))

        await connection.call(_GENERATE, request.SerializeToString(), take)
        self._connections.give_back(connection)
        return answer

    def close(self) -> None:
        self._connections.close()


class WorkersClient:
    """Does a router's work itself: calls a model's prefill worker, then its decode worker. See LoadClient.

    `addresses` are the workers', by their ids.
    """

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._workers = {name: Connections(address, CONNECTIONS) for name, address in addresses.items()}
        self._ids = count()

    async def answer(self, model: str, tokens: int) -> Answer:
        prompt = prompt_pb2.Prompt(token_ids=next(PROMPTS)[:PROMPT_TOKENS].encode())
        sampling = prompt_pb2.Sampling(stop=prompt_pb2.StopConditions(max_tokens=tokens))
        common = {"request_id": f"direct-{next(self._ids)}", "model": model}
        asked = prefill_pb2.PrefillRequest(**common, prompt=prompt, sampling=sampling)  # type: ignore[arg-type]
        prefill, decode = [await self._workers[f"{model}-{role}"].take() for role in ("prefill", "decode")]
        answer, handoff = Answer(tokens), handoff_pb2.KvHandoff()

        def prefilled(message: bytes, now: float) -> None:
            handoff.CopyFrom(prefill_pb2.PrefillResponse.FromString(message).handoff)
            answer.note(now, 1)

        def decoded(message: bytes, now: float) -> None:
            response = decode_pb2.DecodeResponse.FromString(message)
            if response.HasField("tokens"):
                answer.note(now, len(response.tokens.token_ids))

        await prefill.call(_PREFILL, asked.SerializeToString(), prefilled)
        if tokens > 1:
            emitted = [handoff.first_token.token_id]
            request = decode_pb2.DecodeRequest(
                **common,  # type: ignore[arg-type]
                prompt=prompt,
                sampling=sampling,
                handoff=handoff,
                emitted=emitted,
            )
            await decode.call(_DECODE, request.SerializeToString(), decoded)
        return answer

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
