"""Random and malformed bodies to OpenAI's and Anthropic's APIs: never a 500, and each refusal in the API's shape.

A few hundred bodies here; `make fuzz`, or BATON_FUZZ_INPUTS, sends more.
"""

import asyncio
import json
import os
import random
from typing import Any

import httpx2
from support.clients.openai_api import openai_bench, url_of
from support.cluster.in_process import Bench, simulated

INPUTS = int(os.environ.get("BATON_FUZZ_INPUTS", "400"))
SEED = int(os.environ.get("BATON_FUZZ_SEED", "1"))
TOGETHER = 8

PATHS = ["/chat/completions", "/completions", "/responses", "/embeddings", "/models", "/chat/completions/", "/x"]
PATHS += ["/messages", "/messages/count_tokens", "/messages/x"]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]},
    ],
    "max_tokens": 3,
    "temperature": 1.0,
    "top_p": 0.9,
    "n": 2,
    "stop": ["x"],
    "logit_bias": {"7": 1},
    "bad_words": ["fox", ""],
    "seed": 3,
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [TOOL],
    "tool_choice": "auto",
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}},
    "structured_outputs": {"choice": ["a"], "json": {"type": "object"}, "structural_tag": "{}"},
    "logprobs": True,
    "top_logprobs": 2,
    "chat_template_kwargs": {"a": [1, None, {"b": 2.5}]},
    "metadata": {"a": "b"},
    "prompt_cache_key": "s",
    "prompt_cache_retention": "24h",
    "baton": {"retain": {"ttl": 3, "priority": 1}, "parent_session": "p", "next_in": 2.5},
}  # fmt: skip
TEXT = {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 3, "logprobs": 1, "echo": False, "best_of": 1, "suffix": ""}
RESPONSES = {
    "model": "demo",
    "input": [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}], "summary": []},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    ],
    "instructions": "Be brief.",
    "max_output_tokens": 3,
    "stream": True,
    "text": {"format": {"type": "text"}},
}
MESSAGES: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 3,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "On it."},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": [1, None]}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c",
                    "content": [{"type": "text", "text": "1"}],
                    "is_error": True,
                },
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
                {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
                {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
            ],
        },
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}, "strict": False}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "low"},
    "stop_sequences": ["x"],
    "temperature": 1.0,
    "top_k": 3,
    "stream": True,
    "metadata": {"user_id": "a"},
}
EMBEDDINGS = {"model": "demo", "input": ["a", "b"], "dimensions": 3, "encoding_format": "base64", "normalize": True}
STRANGE: list[Any] = [
    None, True, 0, -1, 1, 2**31, 2**32, 2**63, 2**64, -(2**70), 10**400, 0.5, -0.0, 1e308, "", "x", "\ud800", "\x00",
    "ä" * 50, [], {}, [[]], [{}], {"type": "x"}, {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    "data:,", [1, "a"], ["a", "b"], {"": ""}, [None] * 20, "\u2028", {"type": "json_object"},
    {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]},
]  # fmt: skip


def mutated(body: Any, draw: random.Random) -> Any:
    """The body with fields that were removed, added or replaced, at any depth."""
    if isinstance(body, dict) and body:
        changed = {key: mutated(value, draw) if draw.random() < 0.4 else value for key, value in body.items()}
        while changed and draw.random() < 0.5:
            del changed[draw.choice(list(changed))]
        if draw.random() < 0.15:
            changed[
                draw.choice(["frequency_penalty", "user", "min_p", "x", "prompt", "messages", "system", "baton"])
            ] = draw.choice(STRANGE)
        return changed
    if isinstance(body, list) and body and draw.random() < 0.7:
        return [mutated(one, draw) for one in body if draw.random() < 0.8]
    return draw.choice(STRANGE) if draw.random() < 0.4 else body


def mangled(content: bytes, draw: random.Random) -> bytes:
    """The bytes with a piece cut out, doubled or replaced."""
    at, length = draw.randrange(len(content) + 1), draw.randrange(20)
    piece = draw.choice([b"", content[at : at + length] * 3, draw.randbytes(length), b"[" * 2000, b"\\ud800", b"NaN"])
    return content[:at] + piece + content[at + length :]


def body_of(number: int) -> tuple[str, bytes]:
    draw = random.Random(f"{SEED}-{number}")
    path = draw.choice(PATHS)
    plain = draw.choice([CHAT, TEXT, RESPONSES, EMBEDDINGS]) if draw.random() < 0.1 else None
    bodies = {"/completions": TEXT, "/responses": RESPONSES, "/embeddings": EMBEDDINGS}
    plain = plain or (MESSAGES if path.startswith("/messages") else bodies.get(path, CHAT))
    content = json.dumps(mutated(plain, draw)).encode()
    return path, mangled(content, draw) if draw.random() < 0.25 else content


def check_message(answer: httpx2.Response, what: str) -> None:
    """Raises unless it is an answer, or an error, of Anthropic's API."""
    if answer.status_code >= 400:
        body = answer.json()
        assert (body["type"], set(body["error"])) == ("error", {"type", "message"}), what
        assert body["error"]["message"], what
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith('{"type": "message_stop"}\n\n') or "event: error" in answer.text, what
    else:
        assert "input_tokens" in answer.json() or answer.json()["type"] == "message", what


async def send(http: httpx2.AsyncClient, running: Bench, number: int) -> int:
    path, content = body_of(number)
    answer = await http.post(f"{url_of(running)}{path}", content=content)
    what = f"body {number} to {path}: {answer.status_code} {answer.text[:300]}"
    assert answer.status_code < 500, what
    if path.startswith("/messages"):
        check_message(answer, what)
    elif answer.status_code >= 400:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, what
        assert error["message"], what
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n") or "event: response." in answer.text, what
    else:
        assert answer.json()["object"], what
    return answer.status_code


async def test_no_body_is_answered_with_a_500() -> None:
    async with (
        openai_bench(simulated("w1", "prefill", "decode", "embed")) as running,
        httpx2.AsyncClient(trust_env=False, timeout=60) as http,
    ):
        statuses: set[int] = set()
        for first in range(0, INPUTS, TOGETHER):
            numbers = range(first, min(first + TOGETHER, INPUTS))
            statuses |= set(await asyncio.gather(*(send(http, running, number) for number in numbers)))
        assert {200, 400, 404} <= statuses
        assert await running.text_of(prompt="hello", stopping={"max_tokens": 3})
        assert running.used_blocks() == 0
