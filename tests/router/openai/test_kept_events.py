"""OpenAI's streams with `id:` and `Last-Event-ID`: what was cut goes on at any router, exactly."""

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from support.clients.event_source import KEEP, EventSource, Refused
from support.clients.openai_api import OPENAI_ROUTER, openai_bench
from support.cluster.in_process import Bench, simulated
from support.engines.written_engine import HERMES_TEMPLATE, REASONING_TEMPLATE, writes, written_engines
from support.eventually import eventually
from support.memory import peak_memory

from baton.inference.v1 import cluster_service_pb2
from router.config import QuotaConfig, QuotasConfig
from router.server import host_router
from services.config import WorkerConfig

STEP = {"decode_step_seconds": 0.002}
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 60}
TEXT: dict[str, Any] = {"model": "demo", "prompt": "hello", "max_tokens": 60}
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 7}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
USAGE = {"stream_options": {"include_usage": True}}


@dataclass
class Pair:
    """Two routers with OpenAI's API before the same workers."""

    running: Bench
    first: str
    second: str

    def forget(self) -> None:
        """The workers lose all that they kept."""
        for worker in self.running.workers.values():
            worker.kept.forget_all()


@asynccontextmanager
async def routers(*workers: WorkerConfig) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(openai_bench(*workers))
        other = await stack.enter_async_context(host_router(OPENAI_ROUTER, running.registry))
        await eventually(lambda: sum(not worker.problem for worker in other.cluster.workers) == len(workers))
        yield Pair(running, running.openai_address, other.openai_address)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with routers(simulated("p1", "prefill", **STEP), simulated("d1", "decode", **STEP)) as found:
        yield found


async def read_in_pieces(pair: Pair, source: EventSource, cuts: list[int], *, lose: bool = False) -> EventSource:
    """Reads up to each of the cuts, at one router and the other in turn, then to the end."""
    addresses = (pair.first, pair.second)
    for number, cut in enumerate([*cuts, 10**9]):
        await source.read(addresses[number % 2], until=cut)
        if lose:
            pair.forget()
        if source.is_done:
            break
    return source


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/chat/completions", {**CHAT, **SEEDED}),
    "greedy": ("/chat/completions", {**CHAT, "temperature": 0}),
    "usage": ("/chat/completions", {**CHAT, **SEEDED, **USAGE}),
    "three": ("/chat/completions", {**CHAT, **SEEDED, **USAGE, "n": 3}),
    "stop": ("/chat/completions", {**CHAT, **SEEDED, "stop": ["q", "zz", "ab"]}),
    "logprobs": ("/chat/completions", {**CHAT, **SEEDED, "logprobs": True, "top_logprobs": 2}),
    "text": ("/completions", {**TEXT, **SEEDED, **USAGE}),
    "text_logprobs": ("/completions", {**TEXT, **SEEDED, "logprobs": 1}),
}


@pytest.mark.parametrize("lose", [False, True], ids=["kept", "computed_again"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_cut_stream_goes_on_exactly_at_another_router(pair: Pair, kind: str, lose: bool) -> None:
    path, body = KINDS[kind]
    expected = await EventSource(path, body).read(pair.first)
    assert expected.is_done
    assert expected.retry_ms == 200
    chosen = random.Random(kind)
    for _ in range(2):
        cuts = sorted(chosen.randrange(1, len(expected.events)) for _ in range(3))
        found = await read_in_pieces(pair, EventSource(path, body), cuts, lose=lose)
        assert (found.errors, found.is_done) == ([], True)
        assert found.choices == expected.choices
        assert found.usages == expected.usages
        assert len(found.identities) == 1


async def test_a_cut_after_each_event_loses_and_repeats_nothing(pair: Pair) -> None:
    path, body = "/chat/completions", {**CHAT, **SEEDED, **USAGE, "max_tokens": 12}
    expected = await EventSource(path, body).read(pair.first)
    found = await read_in_pieces(pair, EventSource(path, body), list(range(1, len(expected.events) + 1)))
    assert found.connections > 3
    assert (found.choices, found.usages, found.is_done) == (expected.choices, expected.usages, True)


@pytest.mark.parametrize("lose", [False, True], ids=["kept", "computed_again"])
async def test_an_unseeded_answer_goes_on_with_the_seed_that_it_had(pair: Pair, lose: bool) -> None:
    body = {**CHAT, "temperature": 1.0}
    source = await EventSource("/chat/completions", body).read(pair.first, until=9)
    if lose:
        pair.forget()
    before = source.choices[0]["text"]
    await source.read(pair.second)
    assert source.is_done
    assert source.choices[0]["text"].startswith(before)
    assert (len(source.choices[0]["text"]), source.choices[0]["ends"]) == (60, ["length"])


@pytest.mark.parametrize("lose", [False, True], ids=["kept", "computed_again"])
async def test_calls_and_reasoning_go_on_where_they_were(lose: bool) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    cases = [
        (f"On it.{call}{call}", HERMES_TEMPLATE, {"tools": [TOOL]}),
        ("Let me see: é漢.</think>\nIt is 漢字.", REASONING_TEMPLATE, {}),
    ]
    for answer, template, fields in cases:
        with written_engines():
            async with routers(writes(answer, template)) as pair:
                body = {**CHAT, **fields, "max_tokens": 400}
                expected = await EventSource("/chat/completions", body).read(pair.first)
                events = len(expected.events)
                for cut in {1, 2, events // 2, events - 2, events - 1} - {0}:
                    found = await read_in_pieces(pair, EventSource("/chat/completions", body), [cut], lose=lose)
                    assert found.choices == expected.choices


async def test_without_the_header_no_byte_is_another(pair: Pair) -> None:
    source = EventSource("/chat/completions", {**CHAT, **SEEDED}, headers={})
    await source.read(pair.first)
    assert (source.last_id, source.retry_ms) == ("", 0)
    assert all(len(worker.kept) == 0 for worker in pair.running.workers.values())


async def test_the_option_of_the_body_keeps_as_the_header_does(pair: Pair) -> None:
    body = {**CHAT, **SEEDED, "stream_options": {"keep_seconds": 5}}
    source = await EventSource("/chat/completions", body, headers={}).read(pair.first, until=5)
    await source.read(pair.second)
    assert source.choices == (await EventSource("/chat/completions", {**CHAT, **SEEDED}).read(pair.first)).choices


@pytest.mark.parametrize(
    ("headers", "stream", "param"),
    [
        ({"x-baton-keep": "soon"}, True, "x-baton-keep"),
        ({"x-baton-keep": "-1"}, True, "x-baton-keep"),
        ({"x-baton-keep": "nan"}, True, "x-baton-keep"),
        ({"x-baton-keep": "5"}, False, "x-baton-keep"),
        ({"last-event-id": "b1.x;y;1.1.0"}, True, "last-event-id"),
    ],
)
async def test_a_wrong_keep_is_refused_by_its_name(
    pair: Pair, headers: dict[str, str], stream: bool, param: str
) -> None:
    source = EventSource("/chat/completions", {**CHAT, "stream": stream}, headers=headers)
    with pytest.raises(Refused) as refused:
        await source.read(pair.first)
    assert (refused.value.status, refused.value.error["param"]) == (400, param)


async def test_forged_foreign_and_foreign_requests_ids_are_refused_or_computed_anew(pair: Pair) -> None:
    path, body = "/chat/completions", {**CHAT, **SEEDED, "max_tokens": 200}
    source = await EventSource(path, body).read(pair.first, until=20)
    handle, origin, positions = source.last_id.split(";")
    chosen = random.Random(5)
    for forged in (
        "",
        ";",
        f"{handle};{origin}",
        f"{handle[:-1]};{origin};{positions}",
        f"{handle};{origin[:-2]};{positions}",
        f"{handle};{origin};-1.0.0",
        f"{handle};{origin};99999999999.0.0",
        f"{handle};{origin};{positions}/{positions}",
        f"{handle};{origin};{'/'.join([positions] * 2000)}",
        f"{handle};{origin};{positions};{positions}",
        "b" * 5000,
        *("".join(chosen.choices("b1.;/09afou", k=chosen.randrange(1, 120))) for _ in range(100)),
    ):
        wrong = EventSource(path, body, last_id=forged or ";;")
        with pytest.raises(Refused) as refused:
            await wrong.read(pair.second)
        assert (refused.value.status, refused.value.error["param"]) == (400, "last-event-id")
    other = EventSource(path, {**body, "temperature": 0.3}, last_id=source.last_id)
    with pytest.raises(Refused, match="another request"):
        await other.read(pair.second)
    await source.read(pair.second)
    assert source.choices == (await EventSource(path, body).read(pair.first)).choices


async def test_another_tenant_gets_its_own_answer_and_disturbs_nobody(pair: Pair) -> None:
    path, body = "/chat/completions", {**CHAT, "temperature": 1.0, "max_tokens": 40}
    source = await EventSource(path, body).read(pair.first, until=10)
    thief = EventSource(path, body, headers={**KEEP, "x-baton-tenant": "mallory"}, last_id=source.last_id)
    await thief.read(pair.second)
    # It is computed from the seed in the id, under the thief's own name: nothing of the first stream was touched.
    assert all(worker.kept.streams[0].attempt == 0 for worker in pair.running.workers.values() if len(worker.kept) == 1)
    before = source.choices[0]["text"]
    await source.read(pair.second)
    assert source.choices[0]["text"].startswith(before)
    assert source.is_done


async def test_text_that_differs_when_it_is_computed_again_ends_with_a_typed_error(pair: Pair) -> None:
    path, body = "/chat/completions", {**CHAT, **SEEDED}
    source = await EventSource(path, body).read(pair.first, until=20)
    pair.forget()
    head, _, position = source.last_id.rpartition(";")
    tokens, size, _crc = position.split(".")
    source.last_id = f"{head};{tokens}.{size}.00000001"
    await source.read(pair.second)
    assert source.errors == ["stream_diverged"]
    assert not source.is_done


LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/chat/completions", {**CHAT, **SEEDED, **USAGE, "max_tokens": 200}),
    "three": ("/chat/completions", {**CHAT, **SEEDED, **USAGE, "max_tokens": 70, "n": 3}),
    "text": ("/completions", {**TEXT, **SEEDED, **USAGE, "max_tokens": 200}),
    "response": ("/responses", {"model": "demo", "input": "hello", "max_output_tokens": 200, "temperature": 0}),
}


@pytest.mark.parametrize("parked", [False, True], ids=["read", "parked"])
@pytest.mark.parametrize("kind", LONG)
async def test_a_stream_that_goes_on_is_charged_once(kind: str, *, parked: bool) -> None:
    quota = QuotaConfig(requests_per_second=1.0, tokens_per_second=0.1, burst_seconds=50_000.0)
    quotas = QuotasConfig(tenants={"acme": quota})
    router = OPENAI_ROUTER.model_copy(update={"quotas": quotas})
    async with openai_bench(simulated("w", "prefill", "decode", **STEP), router=router) as running:
        path, body = LONG[kind]
        source = EventSource(path, body, {**KEEP, "x-baton-tenant": "acme"})
        for cut in (5, 40, 80, 10**9):
            await source.read(running.openai_address, until=cut)
            if parked:
                # What is generated while nobody reads is charged, too: to whoever reads it first.
                await eventually(lambda: running.workers["w"].engines.load().running == 0)
        last = source.events[-1]
        usage = (last.get("response") or last)["usage"]
        [tenant] = (await running.operators.ListTenants(cluster_service_pb2.ListTenantsRequest())).tenants
        assert tenant.requests_left > 49_998
        # Each of several answers is charged the prompt; what was on its way when a client left, nobody is.
        used = usage["total_tokens"] + (body.get("n", 1) - 1) * usage.get("prompt_tokens", 0)
        assert 0 <= used - (5000 - tenant.tokens_left) <= 30


async def test_more_answers_than_any_request_may_have_are_refused_before_each_has_a_place(pair: Pair) -> None:
    source = EventSource("/completions", {**TEXT, "n": 1_000_000})
    with peak_memory() as peak, pytest.raises(Refused) as refused:
        await source.read(pair.first)
    assert (refused.value.status, refused.value.error["param"]) == (400, "n")
    assert peak.megabytes < 40
