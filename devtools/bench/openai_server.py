"""A server of OpenAI's API over HTTP under load: Baton's façade, vLLM, SGLang, trtllm-serve, a Dynamo frontend.

Prompts are token ids for /v1/completions, or texts with images for /v1/chat/completions. Answers are streamed.
"""

import asyncio
import base64
import json
import re
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import h11

from baton.errors import ConfigError, Unavailable
from devtools.bench.servers import Answer, RequestFailed
from devtools.bench.workload import Planned
from runtime.aio import timeout

_READ_BYTES = 256 * 1024
_MODELS_SECONDS = 10.0
# In an event that is not only a token.
_TELLING = re.compile(rb'"error"|"usage":\s*\{')


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """A server's address, the path before `/v1`, its TLS, and the key that it gets."""

    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None
    api_key: str

    @classmethod
    def of_url(cls, url: str, ca: str | None, api_key: str) -> "HttpTarget":
        """The target of `http://host:port`, also with `/v1` at its end. Raises ConfigError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url: {url!r} is not a URL such as http://127.0.0.1:8000")
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
            tls = ssl.create_default_context(cafile=ca) if parts.scheme == "https" else None
        except (ValueError, OSError) as error:
            raise ConfigError(f"--url: {url!r}: {error}") from error
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port, path, tls, api_key)


class OpenAIServer:
    """Sends a request (BenchServer). A connection carries one request after another, and is kept for the next."""

    def __init__(self, target: HttpTarget, timeout_seconds: float) -> None:
        self._target = target
        self._timeout_seconds = timeout_seconds
        self._idle: list[_Connection] = []

    async def models(self) -> Sequence[str]:
        try:
            async with timeout(_MODELS_SECONDS):
                return [str(model["id"]) for model in json.loads(await self._whole("GET", "/v1/models"))["data"]]
        except (OSError, RequestFailed) as error:
            raise Unavailable(f"{self._target.host}:{self._target.port} lists no models: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--url: /v1/models has no list of models: {error!r}") from error

    async def answer(self, model: str, planned: Planned, came: Callable[[], None]) -> Answer:
        path, body = _request(model, planned)
        reading = _Stream(came)
        try:
            async with (
                timeout(self._timeout_seconds),
                aclosing(self._pieces("POST", path, json.dumps(body).encode())) as pieces,
            ):
                async for piece in pieces:
                    reading.feed(piece)
        except TimeoutError:
            raise RequestFailed("DeadlineExceeded", f"no whole answer within {self._timeout_seconds:g} s") from None
        except OSError as error:
            raise RequestFailed("connection lost", str(error)) from error
        return reading.answer(len(planned.token_ids))

    async def close(self) -> None:
        """Closes all connections."""
        for connection in self._idle:
            connection.writer.close()
        self._idle.clear()

    async def _whole(self, method: str, path: str) -> bytes:
        async with aclosing(self._pieces(method, path, b"")) as pieces:
            return b"".join([piece async for piece in pieces])

    async def _pieces(self, method: str, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """The body of a response, as it comes. Raises RequestFailed for a status other than 200, and OSError."""
        connection = self._open_one() or await _Connection.open(self._target)
        is_complete = False
        try:
            connection.send(self._head(method, path, len(body)), body)
            async for piece in connection.response():
                yield piece
            is_complete = connection.start_next_cycle()
        finally:
            # Of an answer that was not read to its end the rest would be the next one's.
            if is_complete:
                self._idle.append(connection)
            else:
                connection.writer.close()

    def _open_one(self) -> "_Connection | None":
        while self._idle:
            if not (connection := self._idle.pop()).is_closed:
                return connection
            connection.writer.close()
        return None

    def _head(self, method: str, path: str, size: int) -> h11.Request:
        headers = [
            ("host", f"{self._target.host}:{self._target.port}"),
            ("content-type", "application/json"),
            ("content-length", str(size)),
        ]
        if self._target.api_key:
            headers.append(("authorization", f"Bearer {self._target.api_key}"))
        return h11.Request(method=method, target=self._target.path + path, headers=headers)


class _Connection:
    """One connection of HTTP/1.1."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self._reader = reader
        self._http = h11.Connection(h11.CLIENT)

    @property
    def is_closed(self) -> bool:
        """The server has closed it, as servers do with idle ones."""
        return self._reader.at_eof()

    @classmethod
    async def open(cls, target: HttpTarget) -> "_Connection":
        return cls(*await asyncio.open_connection(target.host, target.port, ssl=target.tls))

    def send(self, head: h11.Request, body: bytes) -> None:
        pieces = [self._http.send(head), self._http.send(h11.Data(data=body)), self._http.send(h11.EndOfMessage())]
        self.writer.write(b"".join(piece for piece in pieces if piece))

    async def response(self) -> AsyncGenerator[bytes, None]:
        status, refusal = 200, bytearray()
        while True:
            match await self._next():
                case h11.Response(status_code=status):
                    pass
                case h11.Data(data=data) if status == 200:
                    yield bytes(data)
                case h11.Data(data=data):
                    refusal += data[: 1000 - len(refusal)]
                case h11.EndOfMessage():
                    break
                case h11.ConnectionClosed():
                    raise ConnectionError("the server closed the connection")
        if status != 200:
            raise RequestFailed(f"HTTP {status}", f"HTTP {status}: {refusal.decode('utf-8', 'replace')}")

    def start_next_cycle(self) -> bool:
        """True if another request may follow."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    async def _next(self) -> Any:
        while True:
            try:
                event = self._http.next_event()
                if event is not h11.NEED_DATA:
                    return event
                self._http.receive_data(await self._reader.read(_READ_BYTES))
            except h11.RemoteProtocolError as error:
                raise ConnectionError(f"not HTTP, or cut off: {error}") from error


class _Stream:
    """Reads server-sent events: notes new tokens, and keeps the usage. Parses only what it needs."""

    def __init__(self, came: Callable[[], None]) -> None:
        self._came = came
        self._kept = b""
        self._messages = 0
        self._usage: Mapping[str, Any] = {}
        self._is_done = False

    def feed(self, piece: bytes) -> None:
        """More of the response. Raises RequestFailed for an error in the stream."""
        lines = (self._kept + piece).split(b"\n")
        self._kept = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def answer(self, prompt_tokens: int) -> Answer:
        """The facts at its end. Raises RequestFailed if it ended early."""
        if not self._is_done:
            raise RequestFailed("ended early", "the stream ended without [DONE]")
        details = self._usage.get("prompt_tokens_details") or {}
        return Answer(
            int(self._usage.get("prompt_tokens") or prompt_tokens),
            int(details.get("cached_tokens") or 0),
            int(self._usage.get("completion_tokens") or self._messages),
        )

    def _event(self, content: bytes) -> None:
        if content == b"[DONE]":
            self._is_done = True
            return
        # Most events are a token like the one before: only those that may be something else are parsed.
        if self._messages and not _TELLING.search(content):
            self._messages += 1
            self._came()
            return
        event = json.loads(content)
        if error := event.get("error"):
            raise RequestFailed(str(error.get("code") or error.get("type") or "error"), str(error.get("message")))
        self._usage = event.get("usage") or self._usage
        if any(map(_has_token, event.get("choices") or ())):
            self._messages += 1
            self._came()


def _has_token(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"))


def _request(model: str, planned: Planned) -> tuple[str, dict[str, Any]]:
    common: dict[str, Any] = {
        "model": model,
        "max_tokens": planned.output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if not planned.images:
        return "/v1/completions", {**common, "prompt": planned.token_ids}
    urls = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in planned.images]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    parts.append({"type": "text", "text": planned.text})
    return "/v1/chat/completions", {**common, "messages": [{"role": "user", "content": parts}]}
