"""A client of completions over HTTP/1.1 with streams: reads what comes, and counts events, without parsing JSON."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Final

from benchmarks.router_overhead import Load, prompts

_EVENT: Final = b"data: "
_DONE: Final = b"data: [DONE]"


class HttpClient:
    """Sends loads to one router. Connections are kept and used again, as clients with a pool have them."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._prompts: Iterator[str] = prompts()

    async def close(self) -> None:
        """Closes all connections."""
        for _, writer in self._idle:
            writer.close()

    async def streams(self, model: str, number: int, tokens: int, spread_seconds: float) -> Load:
        """So many streams, which start within `spread_seconds`."""
        load = Load("")
        delays = [index * spread_seconds / number for index in range(number)]
        await asyncio.gather(*(self._stream(load, model, tokens, delay) for delay in delays))
        return load

    async def requests(self, model: str, number: int, lanes: int) -> Load:
        """Requests for one token each, one after another in each lane."""
        load = Load("")

        async def lane() -> None:
            for _ in range(number // lanes):
                await self._stream(load, model, 1, 0.0)

        await asyncio.gather(*(lane() for _ in range(lanes)))
        return load

    async def _stream(self, load: Load, model: str, tokens: int, delay: float) -> None:
        await asyncio.sleep(delay)
        reader, writer = self._idle.pop() if self._idle else await self._connect()
        asked = {
            "model": model,
            "prompt": next(self._prompts),
            "max_tokens": tokens,
            "stream": True,
            "ignore_eos": True,
        }
        body = json.dumps(asked).encode()
        load.requests += 1
        started, first, read = time.perf_counter(), 0.0, b""
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        while not read.endswith(b"0\r\n\r\n"):
            chunk = await reader.read(65536)
            if not chunk:
                raise ConnectionError(f"the router closed the connection: {read[:300]!r}")
            if not first and _EVENT in chunk:
                first = time.perf_counter() - started
            # An event may be cut in two by the end of a chunk.
            events = (read[-12:] + chunk).count(_EVENT) - read[-12:].count(_EVENT)
            load.tokens += events - (read[-12:] + chunk).count(_DONE)
            load.messages += 1
            read = (read + chunk)[-300:]
        load.first_token_seconds.append(first)
        self._idle.append((reader, writer))

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._port)
