"""A client of server-sent events that reconnects with `Last-Event-ID`, as fetch-event-source and EventSource do."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import httpx2

KEEP = {"x-baton-keep": "5"}
# A stream that is silent for so many of its usual gaps, and at least so long, is a reason to ask its router.
_GAPS, _SHORTEST_SECONDS = 2.0, 0.15
_ANSWER_SECONDS = 0.15


@dataclass
class EventSource:
    """All events of one request, over any number of connections. Only whole events count, as the standard says."""

    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=lambda: dict(KEEP))
    events: list[dict[str, Any]] = field(default_factory=list)
    last_id: str = ""
    retry_ms: int = 0
    is_done: bool = False
    connections: int = 0
    http: httpx2.AsyncClient | None = None  # by default one of its own
    is_alive: Callable[[str], Awaitable[bool]] | None = None  # asked while the stream is silent, if given
    resumed: list[tuple[float, float]] = field(default_factory=list)  # the last event before, the first one after
    heard_at: float | None = None
    heard_by: int = 0  # the connection of the last event
    usual_gap: float = 0.0

    async def read(self, address: str, until: int = 10**9) -> "EventSource":
        """Reads at a router until so many events have come in all; then the connection is closed, or has ended."""
        headers = {**self.headers, **({"last-event-id": self.last_id} if self.last_id else {})}
        self.connections += 1
        url = f"http://{address}/v1{self.path}"
        async with connections() if self.http is None else nullcontext(self.http) as http:
            body = json.dumps({"stream": True, **self.body}).encode()
            async with http.stream("POST", url, content=body, headers=headers) as response:
                if response.status_code != 200:
                    raise Refused(response.status_code, json.loads(await response.aread()))
                await self._read_events(response, address, until)
        return self

    async def _read_events(self, response: httpx2.Response, address: str, until: int) -> None:
        buffer, pieces = "", response.aiter_text()
        while (piece := await self._next(pieces, address)) is not None:
            buffer += piece
            while "\n\n" in buffer:
                block, buffer = buffer.split("\n\n", 1)
                self._add(block)
                if len(self.events) >= until or self.is_done:
                    return

    async def _next(self, pieces: AsyncIterator[str], address: str) -> str | None:
        """The next piece; None at the end. Raises ReadTimeout if it is silent and its router answers nothing."""
        reading, began = asyncio.ensure_future(anext(pieces, None)), time.monotonic()
        pause = max(_SHORTEST_SECONDS, _GAPS * self.usual_gap) if self.usual_gap else 1.0
        try:
            while not (await asyncio.wait({reading}, timeout=pause))[0]:
                is_lost = self.is_alive is not None and not await self.is_alive(address)
                if is_lost and not reading.done():
                    raise httpx2.ReadTimeout("the router says nothing, and does not answer")
                pause = time.monotonic() - began
            return await reading
        finally:
            if reading.cancel():
                await asyncio.wait({reading})

    def _add(self, block: str) -> None:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        self.last_id = fields.get("id", self.last_id)
        self.retry_ms = int(fields.get("retry", self.retry_ms))
        data = fields.get("data")
        if data == "[DONE]":
            self.is_done = True
        elif data is not None:
            now = time.monotonic()
            gap = now - (self.heard_at or now)
            if self.heard_at is not None and self.connections > self.heard_by:
                self.resumed.append((self.heard_at, now))
            self.usual_gap = max(min(gap, 1.0 / _GAPS), 0.9 * self.usual_gap)
            self.heard_at, self.heard_by = now, self.connections
            self.events.append(json.loads(data))

    @property
    def errors(self) -> list[str]:
        """The codes of the errors that came as events."""
        return [one["error"]["code"] for one in self.events if "error" in one]

    @property
    def choices(self) -> dict[int, dict[str, Any]]:
        """The answers, put together from their chunks; what comes twice is seen to be twice."""
        found: dict[int, dict[str, Any]] = {}
        for chunk in self.events:
            for choice in chunk.get("choices", ()):
                _fold(found.setdefault(choice["index"], _empty()), choice)
        return found

    @property
    def usages(self) -> list[tuple[int, int]]:
        used = [chunk["usage"] for chunk in self.events if chunk.get("usage")]
        return [(one["prompt_tokens"], one["completion_tokens"]) for one in used]

    @property
    def identities(self) -> set[tuple[str, int]]:
        return {(chunk["id"], chunk["created"]) for chunk in self.events if "error" not in chunk}


def connections() -> httpx2.AsyncClient:
    """Any number of connections, for any number of streams."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx2.AsyncClient(trust_env=False, verify=False, timeout=30.0, limits=limits)


async def is_alive(http: httpx2.AsyncClient, address: str) -> bool:
    """True if a router answers a question in time."""
    try:
        await http.get(f"http://{address}/v1/models", timeout=_ANSWER_SECONDS)
    except httpx2.TransportError:
        return False
    return True


class Refused(Exception):
    """A response that is no stream."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(f"{status}: {body}")
        self.status, self.error = status, body["error"]


def _empty() -> dict[str, Any]:
    return {"roles": 0, "text": "", "reasoning": "", "calls": [], "logprobs": [], "offsets": [], "ends": []}


def _fold(answer: dict[str, Any], choice: dict[str, Any]) -> None:
    delta = choice.get("delta", {})
    answer["roles"] += "role" in delta
    answer["text"] += choice.get("text", "") + (delta.get("content") or "")
    answer["reasoning"] += delta.get("reasoning_content", "")
    answer["calls"] += [(call["index"], call["function"]) for call in delta.get("tool_calls", ())]
    if choice.get("finish_reason"):
        answer["ends"].append(choice["finish_reason"])
    if logprobs := choice.get("logprobs"):
        answer["logprobs"] += [one["token"] for one in logprobs.get("content", ())] or logprobs.get("tokens", [])
        answer["offsets"] += logprobs.get("text_offset", [])
