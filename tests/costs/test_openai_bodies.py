"""No body that OpenAI's or Anthropic's API accepts or refuses holds the event loop."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from support.clients.openai_api import openai_bench
from support.cluster.in_process import DECODE, PREFILL, Bench
from support.lifetimes import in_one_task
from support.loop_turns import assert_never_held


@pytest.fixture
async def served() -> AsyncIterator[Bench]:
    """One prefill and one decode worker, both infinitely fast."""
    async with in_one_task(openai_bench(PREFILL, DECODE)) as running:
        yield running


def chat(**fields: object) -> bytes:
    return json.dumps({"messages": [TURN], **fields}).encode()


def picture(url: str) -> dict[str, object]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


def message(*blocks: object, **fields: object) -> bytes:
    turns = [{"role": "user", "content": list(blocks)}] if blocks else [TURN]
    return json.dumps({"model": "demo", "max_tokens": 3, "messages": turns, **fields}).encode()


def base64_image(size: int) -> dict[str, object]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * size}}


SIZE = 15 * 2**20
TURN = {"role": "user", "content": "hi"}
# CPU time of the loop's thread in one piece: up to 5 ms here, of 30 to 130 ms for the work as a whole. A busy machine
# makes a piece dearer now and then, but not the same work each time.
HELD_SECONDS = 0.02
# Each is close to a limit: of bytes, or of values. Built by its own test: together they take seconds and 150 MB.
LARGE: list[tuple[str, str, Callable[[], bytes], int]] = [
    ("text", "completions", lambda: json.dumps({"prompt": "x" * SIZE}).encode(), 400),
    ("escapes", "completions", lambda: b'{"prompt": "' + b"\\u00e9" * (SIZE // 6) + b'"}', 400),
    ("ids", "completions", lambda: b'{"prompt": [' + b"1," * (SIZE // 2) + b"1]}", 400),
    ("brackets", "completions", lambda: b"[" * SIZE, 400),
    ("structure in a string", "completions", lambda: b'{"prompt": "' + rb"\",[" * (SIZE // 4) + b'"}', 400),
    ("line breaks", "completions", lambda: b'{"prompt": "' + rb"\n" * (SIZE // 2) + b'"}', 400),
    ("image", "chat/completions", lambda: chat(messages=[picture("data:image/png;base64," + "A" * SIZE)]), 400),
    ("chat", "chat/completions", lambda: chat(messages=[{"role": "user", "content": "x " * (SIZE // 2)}]), 400),
    ("turns", "chat/completions", lambda: chat(messages=[TURN] * 9000), 400),
    ("variables", "chat/completions", lambda: chat(max_tokens=3, chat_template_kwargs={"a": [0] * 60_000}), 200),
    ("base64", "messages", lambda: message(base64_image(SIZE)), 400),
    ("no base64", "messages", lambda: message({"type": "tool_use", "input": {"data": "A" * SIZE}}), 400),
    (
        "base64 of a call",
        "messages",
        lambda: message({"type": "tool_use", "id": "c", "name": "f", "input": base64_image(SIZE)}),
        400,
    ),
    ("blocks", "messages", lambda: message(*({"type": "text", "text": "x"} for _ in range(20_000))), 400),
    ("system", "messages", lambda: message(system="x " * (SIZE // 2)), 400),
    (
        "arguments",
        "messages",
        lambda: message({"type": "tool_use", "id": "c", "name": "f", "input": {"a": [0] * 60_000}}),
        400,
    ),
    ("count", "messages/count_tokens", lambda: message(system=[{"type": "text", "text": "x"}] * 20_000), 400),
    ("inputs", "embeddings", lambda: json.dumps({"input": ["x"] * 30_000}).encode(), 400),
]
POST = """
import http.client, sys
host, path, body = sys.argv[1:]
connection = http.client.HTTPConnection(host, timeout=120)
connection.request("POST", path, open(body, "rb").read())
print(connection.getresponse().status)
"""


@pytest.mark.parametrize(("path", "body", "status"), [one[1:] for one in LARGE], ids=[one[0] for one in LARGE])
async def test_no_body_holds_the_event_loop(
    served: Bench, tmp_path: Path, path: str, body: Callable[[], bytes], status: int
) -> None:
    file = tmp_path / "body"
    file.write_bytes(body())
    arguments = ("-c", POST, served.openai_address, f"/v1/{path}", str(file))

    async def attempt() -> None:
        client = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
        output, _ = await client.communicate()
        assert int(output) == status

    await assert_never_held(HELD_SECONDS, attempt)
