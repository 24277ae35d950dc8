"""CacheOptions and EndSession on the embedded engine: what stays in its prefix cache, and what the answer says."""

import time
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest
from support.clients.openai_api import client_of, openai_bench, post
from support.cluster.in_process import Bench, simulated
from support.engines.checkpoints import DEMO
from support.lifetimes import in_one_task

from baton.calls import unary
from baton.errors import InvalidRequest, ModelNotFound
from baton.inference.v1 import generate_pb2, tokenize_pb2
from services.config import WorkerConfig
from services.engines.pytorch.config import PyTorchConfig

BLOCK = 16
BLOCK_BYTES = 6 * 2 * 2 * BLOCK * 32 * 4  # layers, keys and values, heads, numbers of a head, float32
# In blocks of the demo model, whose pool is so small that two long prompts evict a third one.
POOL = 60


def small_worker(*roles: str, share: float = 0.5) -> WorkerConfig:
    engine = PyTorchConfig(
        model=DEMO,
        name="demo",
        threads=1,
        kv_cache_bytes=(POOL + 1) * BLOCK_BYTES,
        retained_share=share,
        max_context_tokens=512,
    )
    return WorkerConfig(worker_id=f"{roles[0]}-w", roles=roles, engine=engine, drain_seconds=0)  # type: ignore[arg-type]


@pytest.fixture
async def served() -> AsyncIterator[Bench]:
    async with in_one_task(openai_bench(small_worker("prefill", "decode"))) as running:
        yield running


async def run(running: Bench, ids: Sequence[int], session: str = "", **cache: object) -> generate_pb2.Usage:
    """The usage of a request for one token."""
    stream = await running.generate(
        token_ids={"ids": ids},
        stopping={"max_tokens": 2, "ignore_eos": True},
        sampling={"temperature": 0},
        routing={"session_key": session},
        **({"cache": cache} if cache else {}),
    )
    return stream.finished.usage


def prompt(start: int, blocks: int) -> list[int]:
    """A prompt of so many blocks and one token, which begins as no other does."""
    return [10 + start, *(20 + number % 200 for number in range(blocks * BLOCK))]


async def cached(running: Bench, ids: Sequence[int]) -> int:
    """The tokens of a prompt that the worker still has. Asking uses them."""
    return (await run(running, ids)).cached_tokens


async def test_what_is_retained_survives_other_prompts_and_the_answer_says_until_when(served: Bench) -> None:
    kept, other = prompt(0, 20), prompt(1, 20)
    before = time.time()
    usage = await run(served, kept, retain={"ttl": {"seconds": 60}})
    assert usage.retained_tokens == 20 * BLOCK
    assert before + 59 < usage.retained_until.seconds < time.time() + 61
    assert (await run(served, other)).retained_tokens == 0
    for start in range(2, 6):
        await run(served, prompt(start, 20))
    assert await cached(served, kept) == 20 * BLOCK
    assert await cached(served, other) == 0


async def test_a_part_of_the_prompt_is_retained(served: Bench) -> None:
    usage = await run(served, prompt(0, 20), retain={"ttl": {"seconds": 60}, "prompt_tokens": 5 * BLOCK + 3})
    assert usage.retained_tokens == 5 * BLOCK
    for start in range(1, 6):
        await run(served, prompt(start, 20))
    assert await cached(served, prompt(0, 20)) == 5 * BLOCK


async def test_a_tenant_retains_at_most_its_share(served: Bench) -> None:
    granted = []
    for start in range(3):
        usage = await run(served, prompt(start, 20), retain={"ttl": {"seconds": 60}})
        granted.append(usage.retained_tokens // BLOCK)
    assert granted == [20, 10, 0]


async def test_a_long_ttl_is_cut(served: Bench) -> None:
    usage = await run(served, prompt(0, 2), retain={"ttl": {"seconds": 10**8}})
    assert usage.retained_until.seconds < time.time() + 3601


async def test_an_ended_session_makes_room_for_others(served: Bench) -> None:
    one, two = prompt(0, 20), prompt(1, 20)
    await run(served, one, session="one")
    await run(served, two, session="two")
    response = await unary(served.stub.EndSession(generate_pb2.EndSessionRequest(session_key="two"), timeout=60))
    assert response.released_blocks == 20
    await run(served, prompt(2, 30))
    assert await cached(served, one) == 20 * BLOCK
    assert await cached(served, two) < 20 * BLOCK
    again = await unary(served.stub.EndSession(generate_pb2.EndSessionRequest(session_key="two"), timeout=60))
    assert again.released_blocks == 0


async def test_a_request_ends_its_session_and_the_parts_of_it(served: Bench) -> None:
    await run(served, prompt(1, 15), session="part", parent_session="whole")
    await run(served, prompt(2, 15), session="other")
    await run(served, prompt(0, 15), session="whole", ends_session=True)
    await run(served, prompt(3, 30))
    assert await cached(served, prompt(2, 15)) == 15 * BLOCK
    assert await cached(served, prompt(1, 15)) + await cached(served, prompt(0, 15)) < 15 * BLOCK


async def test_no_tenant_ends_the_session_of_another(served: Bench) -> None:
    await run(served, prompt(0, 20), session="mine")
    request = generate_pb2.EndSessionRequest(session_key="mine")
    theirs = await unary(served.stub.EndSession(request, timeout=60, metadata=(("x-baton-tenant", "other"),)))
    assert theirs.released_blocks == 0
    assert (await unary(served.stub.EndSession(request, timeout=60))).released_blocks == 20


async def test_a_session_that_cannot_be_is_refused(served: Bench) -> None:
    for wrong, error in (
        ({"session_key": ""}, InvalidRequest),
        ({"session_key": "x" * 1025}, InvalidRequest),
        ({"session_key": "x", "model": "other"}, ModelNotFound),
    ):
        with pytest.raises(error):
            await unary(served.stub.EndSession(generate_pb2.EndSessionRequest(**wrong), timeout=60))


WRONG = {
    "cache.retain.ttl": {"retain": {}},
    "cache.retain.priority": {"retain": {"ttl": {"seconds": 1}, "priority": 11}},
    "cache.retain.chat.messages": {"retain": {"ttl": {"seconds": 1}, "chat": {"messages": 1}}},
    "cache.ends_session": {"ends_session": True},
    "cache.parent_session": {"parent_session": "x"},
    "cache.next_in": {"next_in": {"seconds": 1}},
}


@pytest.mark.parametrize("field", WRONG)
async def test_a_wrong_option_is_named(served: Bench, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await run(served, prompt(0, 1), **WRONG[field])
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.value.details() or "").startswith(field)


LONG = "The quick brown fox jumps over the lazy dog. " * 4


@pytest.mark.parametrize(
    ("place", "ends_before"),
    [
        ({"messages": 1, "parts": 1}, "first"),
        ({"messages": 2, "parts": 1}, "second"),
        ({"messages": 3, "parts": 2}, ""),
    ],
)
async def test_a_chat_is_retained_up_to_a_place_in_it(served: Bench, place: dict[str, int], ends_before: str) -> None:
    chat = {
        "messages": [
            {"role": "system", "parts": [{"text": LONG}]},
            {"role": "user", "parts": [{"text": f"first {LONG}"}, {"text": f"second {LONG}"}]},
            {"role": "user", "parts": [{"text": "third"}, {"text": "fourth"}]},
        ]
    }
    tokenized = await unary(served.stub.Tokenize(tokenize_pb2.TokenizeRequest(chat=chat), timeout=60))
    retain = {"ttl": {"seconds": 60}, "chat": place}
    stream = await served.generate(chat=chat, stopping={"max_tokens": 1}, cache={"retain": retain})
    retained = stream.finished.usage.retained_tokens
    head = tokenized.text.partition(ends_before)[0] if ends_before else tokenized.text
    request = tokenize_pb2.DetokenizeRequest(token_ids=tokenized.token_ids[:retained], keep_special_tokens=True)
    kept = (await unary(served.stub.Detokenize(request, timeout=60))).text
    assert retained % BLOCK == 0
    assert head.startswith(kept.rstrip("\ufffd"))
    # No more than a block, and what the place shares with what follows, is missing.
    assert len(head) - len(kept) < BLOCK * 12


async def test_both_workers_of_a_handoff_retain_and_the_prefill_worker_is_asked() -> None:
    async with openai_bench(small_worker("prefill"), small_worker("decode")) as running:
        usage = await run(running, prompt(0, 20), retain={"ttl": {"seconds": 60}})
        assert usage.retained_tokens == 20 * BLOCK
        for start in range(1, 6):
            await run(running, prompt(start, 20))
        assert await cached(running, prompt(0, 20)) == 20 * BLOCK


async def test_an_engine_without_retention_grants_nothing() -> None:
    async with openai_bench(simulated("w1", "prefill", "decode")) as running:
        stream = await running.generate(
            token_ids={"ids": prompt(0, 4)},
            stopping={"max_tokens": 1},
            routing={"session_key": "x"},
            cache={"retain": {"ttl": {"seconds": 60}}, "ends_session": True, "next_in": {"seconds": 3}},
        )
        usage = stream.finished.usage
        assert (usage.retained_tokens, usage.HasField("retained_until")) == (0, False)
        request = generate_pb2.EndSessionRequest(session_key="x")
        assert (await unary(running.stub.EndSession(request, timeout=60))).released_blocks == 0


async def test_http_names_wrong_options_by_its_own_fields() -> None:
    body = {"model": "demo", "prompt": "x", "max_tokens": 1}
    async with openai_bench(simulated("w1", "prefill", "decode")) as running:
        for wrong, headers, param in (
            ({"baton": {"end_session": True}}, {}, "baton.end_session"),
            ({"baton": {"retain": {"ttl": 0}}}, {}, "baton.retain.ttl"),
            ({"baton": {"retain": {"ttl": 1, "priority": 11}}}, {}, "baton.retain.priority"),
            ({"baton": {"next": 1}}, {}, "baton.next"),
            ({"prompt_cache_retention": "1h"}, {}, "prompt_cache_retention"),
            ({"prompt_cache_options": {"ttl": "1h"}}, {}, "prompt_cache_options.ttl"),
            ({}, {"x-baton-session-end": "yes"}, "x-baton-session-end"),
        ):
            answer = await post(running, "/completions", {**body, **wrong}, **headers)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        right = {"prompt_cache_key": "s", "prompt_cache_options": {"ttl": "30m"}, "baton": {"next_in": 0.5}}
        assert (await post(running, "/completions", {**body, **right})).status_code == 200


@pytest.mark.feature("cache options", engine="pytorch", facade="openai")
async def test_openais_fields_retain_and_headers_end_a_session(served: Bench) -> None:
    create = client_of(served).completions.create
    wanted = {"prompt_cache_key": "kept", "prompt_cache_retention": "24h"}
    kept = await create(model="demo", prompt=prompt(0, 20), max_tokens=1, extra_body=wanted)
    assert kept.usage is not None
    assert kept.usage.prompt_tokens_details is not None
    assert kept.usage.prompt_tokens_details.model_dump()["retained_tokens"] == 20 * BLOCK
    part = {"retain": {"ttl": 30, "prompt_tokens": 2 * BLOCK}, "parent_session": "kept"}
    body = {"baton": part, "prompt_cache_key": "part"}
    await create(model="demo", prompt=prompt(1, 15), max_tokens=1, extra_body=body)
    ends = {"x-baton-session": "kept", "x-baton-session-end": "true"}
    await create(model="demo", prompt=prompt(2, 2), max_tokens=1, extra_headers=ends)
    for start in range(3, 8):
        await create(model="demo", prompt=prompt(start, 10), max_tokens=1)
    assert await cached(served, prompt(0, 20)) == 20 * BLOCK
    assert await cached(served, prompt(1, 15)) == 2 * BLOCK
