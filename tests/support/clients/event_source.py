"""A client of server-sent events that reconnects with `Last-Event-ID`, as fetch-event-source and EventSource do."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2

KEEP = {"x-baton-keep": "5"}


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
    patience_seconds: float = 30.0  # for the next piece of a stream
    longest_gap: float = 0.0
    heard_at: float | None = None

    async def read(self, address: str, until: int = 10**9) -> "EventSource":
        """Reads at a router until so many events have come in all; then the connection is closed, or has ended."""
        headers = {**self.headers, **({"last-event-id": self.last_id} if self.last_id else {})}
        self.connections += 1
        url = f"http://{address}/v1{self.path}"
        async with httpx2.AsyncClient(trust_env=False, verify=False, timeout=self.patience_seconds) as http:
            body = json.dumps({"stream": True, **self.body}).encode()
            async with http.stream("POST", url, content=body, headers=headers) as response:
                if response.status_code != 200:
                    raise Refused(response.status_code, json.loads(await response.aread()))
                await self._read_events(response, until)
        return self

    async def _read_events(self, response: httpx2.Response, until: int) -> None:
        buffer = ""
        async for piece in response.aiter_text():
            buffer += piece
            while "\n\n" in buffer:
                block, buffer = buffer.split("\n\n", 1)
                self._add(block)
                if len(self.events) >= until or self.is_done:
                    return

    def _add(self, block: str) -> None:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        self.last_id = fields.get("id", self.last_id)
        self.retry_ms = int(fields.get("retry", self.retry_ms))
        data = fields.get("data")
        if data == "[DONE]":
            self.is_done = True
        elif data is not None:
            now = time.monotonic()
            self.longest_gap = max(self.longest_gap, now - (self.heard_at or now))
            self.heard_at = now
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
