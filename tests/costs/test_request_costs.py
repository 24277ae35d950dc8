"""The cost of any request on the router's event loop: other streams wait a few milliseconds at most."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode, aio
from support.cluster.in_process import Bench, bench, simulated
from support.engines.checkpoints import DEMO
from support.lifetimes import in_one_task
from support.loop_turns import assert_never_held
from support.servers.scripted_router import status_of

from baton.error_details import from_rpc_error
from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1 import tokenize_pb2
from router.text.tokenizer import Tokenizer

# 5 ms, and as much again for what a busy machine adds to CPU time.
MOST_SECONDS = 0.010

MIB = 2**20
CONTEXT = 131_072
METHODS = "/baton.inference.v1.InferenceService/"


@pytest.fixture
async def roomy() -> AsyncIterator[Bench]:
    """A worker whose model has a context as large models have it."""
    engine = {"max_context_tokens": CONTEXT, "block_tokens": 256}
    async with in_one_task(bench(simulated("w1", "prefill", "decode", **engine))) as running:
        yield running


async def refused(running: Bench, wire: bytes, method: str = "Generate", seconds: float = 30) -> aio.AioRpcError:
    """The status of a request that is given as bytes; the event loop must not be held by it for `seconds`."""
    statuses = []
    async with aio.insecure_channel(running.address) as channel:
        await channel.channel_ready()
        kind = channel.unary_stream if method == "Generate" else channel.unary_unary
        call = kind(METHODS + method, request_serializer=None, response_deserializer=None)

        async def attempt() -> None:
            statuses.append(await status_of(call(wire, timeout=30)))

        await assert_never_held(seconds, attempt)
    return statuses[-1]


def fields_of(status: aio.AioRpcError) -> list[str]:
    error = from_rpc_error(status)
    assert isinstance(error, InvalidRequest), error
    return [violation.field for violation in error.violations]


def chat(count: int, **message: Any) -> pb.ChatInput:
    return pb.ChatInput(messages=[pb.ChatMessage(**message)] * count)


TEXT = [{"text": "x"}]
HOSTILE: dict[str, tuple[str, pb.GenerateRequest]] = {
    "messages": ("chat.messages", pb.GenerateRequest(chat=chat(30_000))),
    "messages within bounds": ("chat.messages[0].role", pb.GenerateRequest(chat=chat(4096))),
    "one role missing": (
        "chat.messages[4095].role",
        pb.GenerateRequest(chat=pb.ChatInput(messages=[*chat(4095, role="u", parts=TEXT).messages, {"parts": TEXT}])),
    ),
    "parts": ("chat.messages.parts", pb.GenerateRequest(chat=chat(1, role="user", parts=[{}] * 30_000))),
    "parts within bounds": (
        "chat.messages[0].parts[0]",
        pb.GenerateRequest(chat=chat(1, role="user", parts=[{}] * 8192)),
    ),
    "images": (
        "chat.messages",
        pb.GenerateRequest(chat=chat(1, role="user", parts=[{"media": {"data": b"x"}}] * 8192)),
    ),
    "media": ("media", pb.GenerateRequest(prompt="x", media=[{}] * 30_000)),
    "ids": ("token_ids.ids", pb.GenerateRequest(token_ids={"ids": [300] * 1_000_000})),
    "ids within the context": (
        "token_ids.ids[0]",
        pb.GenerateRequest(token_ids={"ids": [300] * (CONTEXT - 1)}),
    ),
    "one wrong id": (
        f"token_ids.ids[{CONTEXT - 2}]",
        pb.GenerateRequest(token_ids={"ids": [*[1] * (CONTEXT - 2), 300]}),
    ),
    "biases": (
        "sampling.logit_bias",
        pb.GenerateRequest(prompt="x", sampling={"logit_bias": dict.fromkeys(range(20_000), 1000.0)}),
    ),
    "biases within bounds": (
        "sampling.logit_bias[1023]",
        pb.GenerateRequest(prompt="x", sampling={"logit_bias": {**dict.fromkeys(range(257), 1.0), 1023: 1.0}}),
    ),
    "stop ids": (
        "stopping.stop_token_ids",
        pb.GenerateRequest(prompt="x", stopping={"stop_token_ids": [300] * 1_000_000}),
    ),
    "stop strings": ("stopping.stop", pb.GenerateRequest(prompt="x", stopping={"stop": [""] * 30_000})),
    "bad words": ("sampling.bad_words", pb.GenerateRequest(prompt="x", sampling={"bad_words": [""] * 30_000})),
    "a session key": ("routing.session_key", pb.GenerateRequest(prompt="x", routing={"session_key": "x" * 60_000})),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_refused_request_does_not_hold_the_event_loop(roomy: Bench, name: str) -> None:
    field, request = HOSTILE[name]
    status = await refused(roomy, request.SerializeToString(), seconds=MOST_SECONDS)
    assert status.code() is StatusCode.INVALID_ARGUMENT
    assert fields_of(status)[0] == field


async def test_a_prompt_that_fills_the_context_does_not_hold_the_event_loop(roomy: Bench) -> None:
    request = pb.GenerateRequest(token_ids={"ids": [1] * (CONTEXT - 8)}, stopping={"max_tokens": 1})
    wire = request.SerializeToString()
    async with aio.insecure_channel(roomy.address) as channel:
        await channel.channel_ready()
        call = channel.unary_stream(f"{METHODS}Generate", response_deserializer=pb.GenerateResponse.FromString)

        async def attempt() -> None:
            messages = [message async for message in call(wire, timeout=60)]
            assert messages[-1].finished.usage.prompt_tokens == CONTEXT - 8

        # Of the worker too, which is in this process.
        await assert_never_held(2 * MOST_SECONDS, attempt)


async def test_tokenizing_lets_others_run() -> None:
    tokenizer = Tokenizer((DEMO / "tokenizer.json").read_bytes(), "{}", "")
    text = "hello world apple mango " * 20_000
    task = asyncio.ensure_future(asyncio.to_thread(tokenizer.encode, text))
    turns_meanwhile = 0
    while not task.done():
        await asyncio.sleep(0.005)
        turns_meanwhile += 1
    # It takes some hundred milliseconds; a method that keeps the interpreter to itself leaves a turn or two.
    assert turns_meanwhile > 5
    ids = await task
    assert ids[:200] == tokenizer.encode(text[:1000])[:200]


SLOW_TEMPLATE = """{% macro again(n) %}{% if n > 0 %}{{ again(n - 1) }}{{ again(n - 1) }}{% endif %}{% endmacro %}
{%- for message in messages %}{{ message.content }}{{ again(depth | default(0)) }}{% endfor %}"""


@pytest.fixture
async def slowly_chatty(tmp_path: Path) -> AsyncIterator[Bench]:
    """A worker whose model has a chat template that takes as long as the client says."""
    for file in DEMO.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text(SLOW_TEMPLATE)
    async with in_one_task(bench(simulated("w1", "prefill", "decode", model=str(tmp_path)))) as running:
        yield running


def slow_chat(depth: int) -> pb.ChatInput:
    conversation = chat(1, role="user", parts=TEXT)
    conversation.template_variables.update({"depth": depth})
    return conversation


async def test_a_chat_template_that_does_not_end_soon_does_not_hold_the_event_loop(slowly_chatty: Bench) -> None:
    wire = pb.GenerateRequest(chat=slow_chat(40)).SerializeToString()
    status = await refused(slowly_chatty, wire, seconds=MOST_SECONDS)
    assert (status.code(), fields_of(status)) == (StatusCode.INVALID_ARGUMENT, ["chat.messages"])
    assert "longer than 0.25 s" in str(status.details())


async def test_a_slow_chat_template_is_rendered_in_a_thread(slowly_chatty: Bench) -> None:
    request = pb.GenerateRequest(chat=slow_chat(9), stopping={"max_tokens": 1})
    async with aio.insecure_channel(slowly_chatty.address) as channel:
        call = channel.unary_stream(f"{METHODS}Generate", response_deserializer=pb.GenerateResponse.FromString)
        messages = [message async for message in call(request.SerializeToString(), timeout=60)]
    assert messages[-1].finished.usage.prompt_tokens == 1


async def test_tokenize_bounds_what_it_looks_at(roomy: Bench) -> None:
    request = tokenize_pb2.TokenizeRequest(chat=chat(30_000))
    status = await refused(roomy, request.SerializeToString(), "Tokenize", MOST_SECONDS)
    assert fields_of(status) == ["chat.messages"]


async def test_detokenize_bounds_what_it_looks_at(roomy: Bench) -> None:
    request = tokenize_pb2.DetokenizeRequest(token_ids=[1] * 1_000_000)
    status = await refused(roomy, request.SerializeToString(), "Detokenize", MOST_SECONDS)
    assert fields_of(status) == ["token_ids"]
