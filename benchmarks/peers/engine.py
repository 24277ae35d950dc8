"""The workers of routers that relay bytes: OpenAI completions over HTTP/1.1, whose chunks are ready-made.

    python -m benchmarks.peers.engine prefill|decode PORT

Every request streams `max_tokens` chunks. All streams of a step get theirs at the same instant, as from a real
engine: 30 steps a second, or without a pause if the body names the model `flat`. Prefill ends after its first token.
"""

import asyncio
import json
import sys
from typing import Final, cast

STEP_SECONDS: Final = 1 / 30
_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
    b"cache-control: no-cache\r\n\r\n"
)
_MODELS = {"object": "list", "data": [{"id": name, "object": "model"} for name in ("paced", "flat")]}
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


class Engine:
    """Steps all streams together."""

    def __init__(self, *, is_prefill: bool) -> None:
        self.is_prefill = is_prefill
        self.paced: dict[asyncio.Transport, int] = {}

    async def run(self) -> None:
        """Steps for ever."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + STEP_SECONDS, loop.time())
            await asyncio.sleep(due - loop.time())
            for transport, left in tuple(self.paced.items()):
                if transport.is_closing() or left == 1:
                    del self.paced[transport]
                else:
                    self.paced[transport] = left - 1
                transport.write(_LAST + _DONE if left == 1 else _TOKEN)


class Connection(asyncio.Protocol):
    """One connection, one request after the other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not by isinstance: those of uvloop are of no class of asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._engine.paced.pop(self._transport, None)

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
        tokens = 1 if self._engine.is_prefill else int(asked.get("max_tokens") or 1)
        if not asked.get("stream"):
            # The prefill of a router that asks both workers.
            choice = {"index": 0, "text": "a", "logprobs": None, "finish_reason": "length"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            self._tell(
                {"id": "cmpl-0", "object": "text_completion", "model": "paced", "choices": [choice], "usage": usage}
            )
            return
        self._transport.write(_HEAD)
        if asked.get("model") == "flat" or self._engine.is_prefill:
            self._transport.write(_TOKEN * (tokens - 1) + _LAST + _DONE)
        else:
            self._engine.paced[self._transport] = tokens

    def _tell(self, content: object, is_missing: bool = False) -> None:
        body = json.dumps(content).encode()
        status = b"404 Not Found" if is_missing else b"200 OK"
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
        self._transport.write(head + body)


async def main(role: str, port: int) -> None:
    engine = Engine(is_prefill=role == "prefill")
    await asyncio.get_running_loop().create_server(lambda: Connection(engine), "127.0.0.1", port)
    await engine.run()


if __name__ == "__main__":
    import uvloop

    uvloop.run(main(sys.argv[1], int(sys.argv[2])))
