"""The workers of routers that relay bytes: OpenAI completions over HTTP/1.1, whose chunks are ready-made.

    python -m benchmarks.peers.engine prefill|decode PORT STEPS

Every request streams `max_tokens` chunks, the first of them at once. All streams of a step get theirs at the same
instant, as from a real engine: 30 or 15 steps a second, or one step after the other for `flat`, by the model that the
body names as `user`: smg routes by `model`, and takes an engine to have one. Prefill ends after its first token. The
times of the steps are appended to the file STEPS.
"""

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from benchmarks.peers.clients.load import STEP_SECONDS
from benchmarks.peers.clients.steps import StepLog

_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
    b"cache-control: no-cache\r\n\r\n"
)
_MODELS = {"object": "list", "data": [{"id": name, "object": "model"} for name in STEP_SECONDS]}
# What the routers ask before they send requests.
_FACTS = {"model_path": "paced", "tp_size": 1, "dp_size": 1, "max_running_requests": 4096, "status": "ready"}


def _chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


def _event(text: str, finish_reason: str | None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
    body = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "paced", "choices": [choice]}
    return _chunk(b"data: " + json.dumps(body).encode() + b"\n\n")


_TOKEN, _LAST = _event("a", None), _event("a", "length")
_DONE = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Model:
    """Steps all streams of one model together."""

    def __init__(self, step_seconds: float, log: StepLog) -> None:
        self._step_seconds = step_seconds
        self._log = log
        self._left: dict[asyncio.Transport, int] = {}
        self._wake = asyncio.Event()

    def add(self, transport: asyncio.Transport, tokens: int) -> None:
        """A stream that is to get so many more tokens."""
        self._left[transport] = tokens
        self._wake.set()

    def drop(self, transport: asyncio.Transport) -> None:
        """The stream gets no more."""
        self._left.pop(transport, None)

    async def run(self) -> None:
        """Steps for ever."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            self._wake.clear()
            if not self._left:
                await self._wake.wait()
            due = max(due + self._step_seconds, loop.time())
            await asyncio.sleep(max(0.0, due - loop.time()))
            if self._step_seconds:
                self._log.note()
            self._step()

    def _step(self) -> None:
        for transport, left in tuple(self._left.items()):
            if left == 1:
                del self._left[transport]
            else:
                self._left[transport] = left - 1
            transport.write(_LAST + _DONE if left == 1 else _TOKEN)


class Connection(asyncio.Protocol):
    """One connection, one request after the other."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        self._models = models
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not by isinstance: those of uvloop are of no class of asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        for model in self._models.values():
            model.drop(self._transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end].decode("latin-1").lower()
            length = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:")), 0)
            if len(self._received) < end + 4 + length:
                return
            body = self._received[end + 4 : end + 4 + length]
            self._received = self._received[end + 4 + length :]
            self._answer(head.split(" ", 2), body)

    def _answer(self, request: list[str], body: bytes) -> None:
        if len(request) < 3 or request[0] == "pri":
            # Some ask whether it is HTTP/2.
            self._transport.close()
            return
        if request[0] != "post" or "completions" not in request[1] or request[1].endswith("/render"):
            self._tell(_MODELS if request[1].startswith("/v1/models") else _FACTS, "render" in request[1])
            return
        asked = json.loads(body)
        # Of a prefill worker there are no models that step.
        tokens = int(asked.get("max_tokens") or 1) if self._models else 1
        if not asked.get("stream"):
            # The prefill of a router that asks both workers.
            choice = {"index": 0, "text": "a", "logprobs": None, "finish_reason": "length"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            self._tell(
                {"id": "cmpl-0", "object": "text_completion", "model": "paced", "choices": [choice], "usage": usage}
            )
            return
        if tokens == 1:
            self._transport.write(_HEAD + _LAST + _DONE)
        else:
            self._transport.write(_HEAD + _TOKEN)
            self._models[asked["user"]].add(self._transport, tokens - 1)

    def _tell(self, content: object, is_missing: bool = False) -> None:
        body = json.dumps(content).encode()
        status = b"404 Not Found" if is_missing else b"200 OK"
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
        self._transport.write(head + body)


async def main(role: str, port: int, steps: Path) -> None:
    log = StepLog(steps)
    models = {name: Model(seconds, log) for name, seconds in STEP_SECONDS.items()} if role == "decode" else {}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(models), "127.0.0.1", port, backlog=4096)
    await asyncio.gather(server.serve_forever(), *(model.run() for model in models.values()))


if __name__ == "__main__":
    import uvloop

    uvloop.run(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
