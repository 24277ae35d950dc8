"""/v1/responses in the background: retrieved, streamed after a number, cancelled and deleted, at any router."""

import asyncio

import openai
import pytest
from support.clients.event_source import EventSource, Refused
from support.clients.kept_responses import (
    ASKED,
    STEP,
    TOOL,
    Pair,
    client,
    ended,
    events_of,
    router_with,
    routers,
    text_of,
)
from support.clients.openai_api import openai_bench
from support.clients.scraping import since
from support.cluster.in_process import simulated
from support.engines.written_engine import HERMES_TEMPLATE, REASONING_TEMPLATE, writes, written_engines
from support.eventually import eventually

from router.resume.handle import Handle


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
    await eventually(lambda: pair.running.used_blocks() == 0)
    again = await getattr(pair, router).responses.cancel(made.id)
    assert again.status == "cancelled"
    stream = await events_of(await getattr(pair, router).responses.retrieve(made.id, stream=True))
    assert (stream[-1].type, stream[-1].response.status) == ("response.failed", "cancelled")


async def test_a_deleted_response_is_gone_everywhere(pair: Pair) -> None:
    made = await pair.first.responses.create(**{**ASKED, "max_output_tokens": 2000}, background=True)
    await pair.first.responses.delete(made.id)
    await eventually(lambda: pair.running.used_blocks() == 0)
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
