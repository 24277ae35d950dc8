"""/v1/responses in the background, streamed after a number, retrieved, cancelled, deleted, and gone on from."""

import asyncio
import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from support.clients.event_source import EventSource, Refused
from support.clients.openai_api import ALONE, OPENAI_ROUTER, openai_bench
from support.clients.scraping import since
from support.cluster.in_process import Bench, simulated
from support.engines.written_engine import HERMES_TEMPLATE, REASONING_TEMPLATE, writes, written_engines
from support.eventually import eventually

from baton.inference.v1 import cluster_service_pb2
from router.config import OpenAIConfig, QuotaConfig, QuotasConfig, RouterConfig, StoredResponsesConfig
from router.openai.resumable.event_ids import Position
from router.resume.handle import Handle
from router.server import Router, host_router
from rpc.auth.access import AuthConfig
from services.config import WorkerConfig

STEP = {"decode_step_seconds": 0.005}
ASKED: dict[str, Any] = {"model": "demo", "input": "hello", "max_output_tokens": 40, "temperature": 0}
KEYS = [("ann", "client"), ("bob", "client")]
TOOL: Any = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}


def client(address: str, key: str = "any", **headers: str) -> openai.AsyncOpenAI:
    base = f"http://{address}/v1"
    return openai.AsyncOpenAI(
        base_url=base, api_key=key, max_retries=0, timeout=30, default_headers={**ALONE, **headers}
    )


@dataclass
class Pair:
    """Two routers before the same workers, and a client of each."""

    running: Bench
    other: Router
    stop_other: AsyncExitStack

    @property
    def first(self) -> openai.AsyncOpenAI:
        return client(self.running.openai_address)

    @property
    def second(self) -> openai.AsyncOpenAI:
        return client(self.other.openai_address)


def router_with(**responses: Any) -> RouterConfig:
    stored = StoredResponsesConfig(**responses)
    return OPENAI_ROUTER.model_copy(update={"openai": OpenAIConfig(listen="127.0.0.1:0", responses=stored)})


@asynccontextmanager
async def routers(*workers: WorkerConfig, router: RouterConfig = OPENAI_ROUTER) -> AsyncIterator[Pair]:
    async with openai_bench(*workers, router=router) as running, AsyncExitStack() as stack:
        other = await stack.enter_async_context(host_router(router, running.registry))
        await eventually(lambda: sum(not worker.problem for worker in other.cluster.workers) == len(workers))
        yield Pair(running, other, stack)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with routers(simulated("p1", "prefill", **STEP), simulated("d1", "decode", **STEP)) as found:
        yield found


async def ended(of: openai.AsyncOpenAI, identity: str) -> Any:
    for _ in range(1000):
        found = await of.responses.retrieve(identity)
        if found.status not in ("queued", "in_progress"):
            return found
        await asyncio.sleep(0.02)
    raise AssertionError("the response has not ended")


async def events_of(stream: Any, until: int = 10**9) -> list[Any]:
    found: list[Any] = []
    async with stream:
        async for event in stream:
            found.append(event)
            if len(found) >= until:
                break
    return found


def text_of(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


async def test_a_response_in_the_background_is_retrieved_as_it_comes(pair: Pair) -> None:
    expected = await pair.first.responses.create(**ASKED)
    made = await pair.first.responses.create(**ASKED, background=True, instructions=None, metadata={"a": "b"})
    assert made.status in ("queued", "in_progress")
    assert made.background is True
    found = await ended(pair.first, made.id)
    assert (found.status, found.output_text) == (expected.status, expected.output_text)
    assert (found.id, found.created_at, found.metadata) == (made.id, made.created_at, {"a": "b"})
    assert found.usage is not None
    assert found.usage.output_tokens == 40


async def test_a_wrong_response_in_the_background_is_refused_at_once(pair: Pair) -> None:
    with pytest.raises(openai.NotFoundError):
        await pair.first.responses.create(**{**ASKED, "model": "no-such"}, background=True)
    with pytest.raises(openai.BadRequestError, match="store"):
        await pair.first.responses.create(**ASKED, background=True, store=False)


async def test_events_after_a_number_are_those_that_the_first_stream_would_have_given(pair: Pair) -> None:
    stream = await pair.first.responses.create(**ASKED, background=True, stream=True)
    head = await events_of(stream, until=9)
    identity = head[0].response.id
    after = head[-1].sequence_number
    tail = await events_of(await pair.first.responses.retrieve(identity, stream=True, starting_after=after))
    whole = await events_of(await pair.first.responses.retrieve(identity, stream=True))
    expected = await pair.first.responses.create(**ASKED)
    assert text_of(head) + text_of(tail) == text_of(whole) == expected.output_text
    numbers = [event.sequence_number for event in [*head, *tail]]
    assert numbers == sorted(set(numbers))
    assert (tail[-1].type, whole[-1].sequence_number) == ("response.incomplete", tail[-1].sequence_number)
    assert tail[-1].response.output_text == expected.output_text


async def test_every_number_gives_exactly_the_rest(pair: Pair) -> None:
    made = await pair.first.responses.create(**ASKED, background=True)
    found = await ended(pair.first, made.id)
    whole = await events_of(await pair.first.responses.retrieve(made.id, stream=True))
    for after in range(whole[-1].sequence_number + 1):
        rest = await events_of(await pair.first.responses.retrieve(made.id, stream=True, starting_after=after))
        assert all(event.sequence_number > after for event in rest)
        assert found.output_text.endswith(text_of(rest))
    assert rest == []


async def test_another_router_goes_on_with_it_when_the_first_is_gone(pair: Pair) -> None:
    asked = {**ASKED, "max_output_tokens": 120, "instructions": "Be brief."}
    expected = await pair.first.responses.create(**asked)
    made = await events_of(await pair.second.responses.create(**asked, background=True, stream=True), until=8)
    identity, after = made[0].response.id, made[-1].sequence_number
    await pair.stop_other.aclose()
    tail = await events_of(await pair.first.responses.retrieve(identity, stream=True, starting_after=after))
    assert text_of(made) + text_of(tail) == expected.output_text
    found = await pair.first.responses.retrieve(identity)
    assert (found.status, found.output_text, found.instructions) == ("incomplete", expected.output_text, "Be brief.")
    assert (found.created_at, found.id) == (made[0].response.created_at, identity)


async def test_two_routers_that_are_asked_in_turn_both_tell_the_same(pair: Pair) -> None:
    asked = {**ASKED, "max_output_tokens": 150}
    expected = await pair.first.responses.create(**asked)
    made = await pair.first.responses.create(**asked, background=True)
    # Before its first token no decode worker has it.
    await events_of(await pair.first.responses.retrieve(made.id, stream=True), until=5)
    for _ in range(4):
        for each in (pair.second, pair.first):
            found = await each.responses.retrieve(made.id)
            assert expected.output_text.startswith(found.output_text)
    assert (await ended(pair.second, made.id)).output_text == expected.output_text
    assert (await pair.first.responses.retrieve(made.id)).output_text == expected.output_text


@pytest.mark.parametrize("router", ["first", "second"])
async def test_a_cancelled_response_ends_and_frees_its_worker(pair: Pair, router: str) -> None:
    made = await pair.first.responses.create(**{**ASKED, "max_output_tokens": 2000}, background=True)
    await asyncio.sleep(0.1)
    cancelled = await getattr(pair, router).responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    await eventually(lambda: pair.running.used_blocks() == 0, 5.0)
    again = await getattr(pair, router).responses.cancel(made.id)
    assert again.status == "cancelled"
    stream = await events_of(await getattr(pair, router).responses.retrieve(made.id, stream=True))
    assert (stream[-1].type, stream[-1].response.status) == ("response.failed", "cancelled")


async def test_a_deleted_response_is_gone_everywhere(pair: Pair) -> None:
    made = await pair.first.responses.create(**{**ASKED, "max_output_tokens": 2000}, background=True)
    await pair.first.responses.delete(made.id)
    await eventually(lambda: pair.running.used_blocks() == 0, 5.0)
    for each in (pair.first, pair.second):
        with pytest.raises(openai.NotFoundError):
            await each.responses.retrieve(made.id)


@pytest.mark.parametrize("answer", ["On it.CALLCALL", "CALL"])
async def test_calls_come_after_the_text_on_any_router(answer: str) -> None:
    called = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    with written_engines():
        async with routers(writes(answer.replace("CALL", called), HERMES_TEMPLATE)) as pair:
            asked = {**ASKED, "max_output_tokens": 400, "tools": [TOOL]}
            made = await pair.first.responses.create(**asked, background=True)
            found = await ended(pair.first, made.id)
            whole = await events_of(await pair.first.responses.retrieve(made.id, stream=True))
            other = await events_of(await pair.second.responses.retrieve(made.id, stream=True))
            assert [each.type for each in found.output][-1] == "function_call"
            seen = [(one.type, one.sequence_number) for one in whole if ".delta" not in one.type]
            assert [(one.type, one.sequence_number) for one in other if ".delta" not in one.type] == seen
            assert found.output == other[-1].response.output


async def test_reasoning_is_an_item_before_the_text() -> None:
    with written_engines():
        async with routers(writes("hm é漢</think>\nYes 漢.", REASONING_TEMPLATE)) as pair:
            made = await pair.first.responses.create(**{**ASKED, "max_output_tokens": 400}, background=True)
            found = await ended(pair.second, made.id)
            assert [each.type for each in found.output] == ["reasoning", "message"]
            assert found.output_text == "Yes 漢."


async def test_a_cut_stream_of_a_response_goes_on_after_its_last_id(pair: Pair) -> None:
    addresses = (pair.running.openai_address, pair.other.openai_address)
    for lose in (False, True):
        asked = {**ASKED, "temperature": 1.0, "seed": None}
        source = EventSource("/responses", {key: value for key, value in asked.items() if value is not None})
        for number, cut in enumerate((4, 12, 20, 10**9)):
            await source.read(addresses[number % 2], until=cut)
            if lose:
                for worker in pair.running.workers.values():
                    worker.kept.forget_all()
        text = "".join(one["delta"] for one in source.events if one["type"] == "response.output_text.delta")
        assert source.events[-1]["response"]["output"][0]["content"][0]["text"] == text
        numbers = [one["sequence_number"] for one in source.events]
        assert (numbers, len(text)) == (sorted(set(numbers)), 40)


# The store.


async def test_a_stored_response_is_gone_on_from_with_its_whole_conversation(pair: Pair) -> None:
    with written_engines():
        async with openai_bench(writes("Oslo.", HERMES_TEMPLATE)) as running:
            of = client(running.openai_address)
            first = await of.responses.create(model="demo", input="Where?", instructions="Be brief.", store=True)
            second = await of.responses.create(
                model="demo", input="Why?", previous_response_id=first.id, store=True, stream=True
            )
            events = await events_of(second)
            third = await of.responses.create(
                model="demo", input="When?", previous_response_id=events[-1].response.id, instructions="Be kind."
            )
            turns: Any = [
                {"role": "user", "content": "Where?"},
                {"role": "assistant", "content": "Oslo."},
                {"role": "user", "content": "Why?"},
                {"role": "assistant", "content": "Oslo."},
                {"role": "user", "content": "When?"},
            ]
            whole = await of.responses.create(model="demo", input=turns, instructions="Be kind.")
            assert third.usage is not None
            assert whole.usage is not None
            assert third.usage.input_tokens == whole.usage.input_tokens
            assert third.previous_response_id == events[-1].response.id
            assert (first.store, third.store) == (True, False)
            assert (await of.responses.retrieve(first.id)).output_text == "Oslo."


async def test_outputs_of_calls_go_on_from_the_response_that_made_the_calls() -> None:
    called = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    with written_engines():
        async with openai_bench(writes(called, HERMES_TEMPLATE)) as running:
            of = client(running.openai_address)
            first = await of.responses.create(model="demo", input="Weather?", tools=[TOOL], store=True)
            call: Any = first.output[0]
            output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
            second = await of.responses.create(
                model="demo", input=[output], tools=[TOOL], previous_response_id=first.id
            )
            asked: Any = [{"role": "user", "content": "Weather?"}, call.model_dump(exclude_none=True), output]
            whole = await of.responses.create(model="demo", input=asked, tools=[TOOL])
            assert (second.usage and second.usage.input_tokens) == (whole.usage and whole.usage.input_tokens)


async def test_what_is_not_stored_or_elsewhere_is_refused_with_the_reason(pair: Pair) -> None:
    plain = await pair.first.responses.create(**ASKED)
    stored = await pair.first.responses.create(**ASKED, store=True)
    cases = [(pair.first, plain.id), (pair.first, "resp_x"), (pair.second, stored.id)]
    for of, identity in cases:
        with pytest.raises(openai.BadRequestError, match="is on another router") as refused:
            await of.responses.create(**ASKED, previous_response_id=identity)
        assert refused.value.param == "previous_response_id"
        with pytest.raises(openai.NotFoundError):
            await of.responses.retrieve(identity)


async def test_a_response_is_of_its_tenant_alone(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    listed = "".join(
        f"  - {{name: {name}, role: {role}, token: the-long-secret-key-of-{name}}}\n" for name, role in KEYS
    )
    tokens.write_text(f"tokens:\n{listed}")
    tokens.chmod(0o600)
    router = OPENAI_ROUTER.model_copy(update={"auth": AuthConfig(tokens_file=tokens)})
    async with routers(simulated("w", "prefill", "decode", **STEP), router=router) as pair:
        ann, bob = (client(pair.running.openai_address, f"the-long-secret-key-of-{name}") for name in ("ann", "bob"))
        elsewhere = client(pair.other.openai_address, "the-long-secret-key-of-bob")
        asked = {**ASKED, "max_output_tokens": 300}
        made = await ann.responses.create(**asked, background=True)
        stored = await ann.responses.create(**ASKED, store=True)
        for of in (bob, elsewhere):
            for identity in (made.id, stored.id):
                with pytest.raises(openai.NotFoundError):
                    await of.responses.retrieve(identity)
                with pytest.raises(openai.NotFoundError):
                    await of.responses.cancel(identity)
                with pytest.raises(openai.NotFoundError):
                    await of.responses.delete(identity)
                with pytest.raises(openai.BadRequestError):
                    await of.responses.create(**ASKED, previous_response_id=identity)
        assert (await ended(ann, made.id)).status == "incomplete"


async def test_a_tenant_keeps_no_more_than_its_bytes() -> None:
    router = router_with(tenant_bytes=40_000, max_bytes=90_000)
    async with openai_bench(simulated("w", "prefill", "decode"), router=router) as running:
        made: dict[str, list[str]] = {}
        for tenant in ("ann", "bob", "ann", "cy", "ann", "ann", "ann"):
            of = client(running.openai_address, **{"x-baton-tenant": tenant})
            found = await of.responses.create(**{**ASKED, "input": "x" * 8000}, store=True)
            made.setdefault(tenant, []).append(found.id)
        ann = client(running.openai_address, **{"x-baton-tenant": "ann"})
        kept = []
        for identity in made["ann"]:
            try:
                kept.append((await ann.responses.retrieve(identity)).id)
            except openai.NotFoundError:
                continue
        assert kept == made["ann"][-len(kept) :]
        assert 2 <= len(kept) <= 4
        for tenant in ("bob", "cy"):
            await client(running.openai_address, **{"x-baton-tenant": tenant}).responses.retrieve(made[tenant][0])
        with pytest.raises(openai.BadRequestError, match="kept for a tenant"):
            await ann.responses.create(**{**ASKED, "input": "x" * 50_000}, store=True)


async def test_old_responses_are_dropped_and_only_so_many_run() -> None:
    router = router_with(seconds=0.05, max_running=1)
    async with openai_bench(simulated("w", "prefill", "decode", **STEP), router=router) as running:
        of = client(running.openai_address)
        stored = await of.responses.create(**ASKED, store=True)
        await asyncio.sleep(0.1)
        with pytest.raises(openai.NotFoundError):
            await of.responses.retrieve(stored.id)
        await of.responses.create(**{**ASKED, "max_output_tokens": 2000}, background=True)
        with pytest.raises(openai.InternalServerError) as refused:
            await of.responses.create(**ASKED, background=True)
        assert refused.value.status_code == 503


async def test_a_tenant_leaves_running_places_to_others() -> None:
    router = router_with(max_running=2, tenant_running=1)
    async with openai_bench(simulated("w", "prefill", "decode", **STEP), router=router) as running:
        ann, bob = (client(running.openai_address, **{"x-baton-tenant": name}) for name in ("ann", "bob"))
        long = {**ASKED, "max_output_tokens": 2000}
        await ann.responses.create(**long, background=True)
        with pytest.raises(openai.RateLimitError) as refused:
            await ann.responses.create(**long, background=True)
        assert refused.value.response.headers["retry-after"] == "1"
        assert (await bob.responses.create(**long, background=True)).status in ("queued", "in_progress")


async def test_a_response_that_is_not_kept_says_what_would_keep_it(pair: Pair) -> None:
    made = await pair.first.responses.create(**ASKED)
    with pytest.raises(openai.BadRequestError, match="it was made without `store: true`") as refused:
        await pair.first.responses.create(**ASKED, previous_response_id=made.id)
    assert refused.value.param == "previous_response_id"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=yes", "stream"),
        ("starting_after=1", "starting_after"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=true&starting_after=99999999999999999", "starting_after"),
        ("include=x", "include"),
        ("&".join(f"a{n}=1" for n in range(40)), "a0"),
    ],
)
async def test_wrong_options_are_refused_by_their_names(pair: Pair, query: str, param: str) -> None:
    made = await pair.first.responses.create(**ASKED, background=True)
    with pytest.raises(openai.BadRequestError) as refused:
        await pair.first.get(f"/responses/{made.id}?{query}", cast_to=dict)
    assert refused.value.param == param


async def test_a_chats_handle_is_no_response(pair: Pair) -> None:
    source = EventSource("/completions", {"model": "demo", "prompt": "a", "max_tokens": 200})
    await source.read(pair.running.openai_address, until=3)
    with pytest.raises(openai.NotFoundError):
        await pair.second.responses.retrieve(f"resp_{source.last_id.split(';')[0]}")
    await source.read(pair.other.openai_address)
    assert source.is_done


async def test_a_response_that_is_taken_over_again_and_again_is_charged_once() -> None:
    quota = QuotaConfig(tokens_per_second=1.0, burst_seconds=9000.0)
    quotas = QuotasConfig(tenants={"acme": quota})
    router = OPENAI_ROUTER.model_copy(update={"quotas": quotas})
    async with openai_bench(simulated("w", "prefill", "decode", **STEP), router=router) as running:
        of = client(running.openai_address, **{"x-baton-tenant": "acme"})
        made = await of.responses.create(**{**ASKED, "max_output_tokens": 200}, background=True)
        await events_of(await of.responses.retrieve(made.id, stream=True), until=20)
        handle, taken = Handle.parse(made.id.removeprefix("resp_")), made.id
        for number in range(8):
            # Another hint at its worker: to a router it is one that it does not have yet.
            taken = f"resp_{handle.at(str(number)).text}"
            await events_of(await of.responses.retrieve(taken, stream=True), until=20 + 15 * number)
        found = await ended(of, taken)
        [tenant] = (await running.operators.ListTenants(cluster_service_pb2.ListTenantsRequest())).tenants
        assert 9000 - tenant.tokens_left == pytest.approx(found.usage.total_tokens, abs=20)


async def test_a_response_that_is_not_found_is_no_lost_answer(pair: Pair) -> None:
    lost = since("baton_router_resumptions_total", result="lost")
    with pytest.raises(openai.NotFoundError):
        await pair.first.responses.retrieve(f"resp_{Handle.new('ab' * 16).text}")
    assert lost.grown == 0


async def test_a_response_has_one_id(pair: Pair) -> None:
    made = await pair.first.responses.create(**ASKED, background=True)
    await ended(pair.first, made.id)
    for of in (pair.first, pair.second):
        with pytest.raises(openai.NotFoundError):
            await of.responses.retrieve(f"{made.id[:20]}{'!' * 3000}{made.id[20:]}")
    assert (await ended(pair.second, made.id)).id == made.id


async def test_a_response_that_is_made_to_go_on_from_itself_holds_up_nobody(pair: Pair) -> None:
    address = pair.running.openai_address
    first = await EventSource("/responses", {**ASKED, "store": True}).read(address)
    identity = first.events[0]["response"]["id"]
    again = EventSource("/responses", {**ASKED, "store": True, "previous_response_id": identity})
    await again.read(address)
    # The id of an event of this request, with the name of the response that it goes on from.
    name = struct.unpack(">QIQI", urlsafe_b64decode(first.last_id.split(";")[1]))[2]
    handle, origin, _ = again.last_id.split(";")
    seed, created, _, crc = struct.unpack(">QIQI", urlsafe_b64decode(origin))
    forged = urlsafe_b64encode(struct.pack(">QIQI", seed, created, name, crc)).decode()
    for worker in pair.running.workers.values():
        worker.kept.forget_all()
    again.last_id = f"{handle};{forged};{Position().text}"
    await again.read(address)
    assert again.events[-1]["response"]["id"] == identity
    with pytest.raises(openai.BadRequestError, match="goes on from more than"):
        await pair.first.responses.create(**ASKED, previous_response_id=identity)


async def test_no_error_tells_the_secret_of_a_response(pair: Pair) -> None:
    made = await pair.first.responses.create(**ASKED, background=True)
    await pair.first.responses.delete(made.id)
    secret = made.id[32:]
    refused = []
    for asking in (
        pair.first.responses.retrieve(made.id),
        pair.first.put(f"/responses/{made.id}", cast_to=dict),
        pair.first.responses.create(**ASKED, previous_response_id=made.id),
    ):
        with pytest.raises(openai.APIStatusError) as error:
            await asking
        refused.append((error.value.status_code, secret in str(error.value.body)))
    assert refused == [(404, False), (405, False), (400, False)]


async def test_an_id_of_an_event_needs_a_stream_that_is_kept(pair: Pair) -> None:
    source = EventSource("/completions", {"model": "demo", "prompt": "a", "max_tokens": 9})
    await source.read(pair.running.openai_address, until=3)
    source.headers = {"x-baton-keep": "0"}
    with pytest.raises(Refused) as refused:
        await source.read(pair.running.openai_address)
    assert refused.value.error["param"] == "last-event-id"


async def test_a_forged_id_of_an_event_is_refused(pair: Pair) -> None:
    source = EventSource("/responses", ASKED, last_id="b1.x;y;1.1.0")
    with pytest.raises(Refused) as refused:
        await source.read(pair.running.openai_address)
    assert refused.value.error["param"] == "last-event-id"
