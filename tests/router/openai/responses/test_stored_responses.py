"""Stored responses: gone on from, kept for their tenant alone, within its bytes."""

import asyncio
import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from pathlib import Path
from typing import Any

import openai
import pytest
from support.clients.event_source import EventSource
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
)
from support.clients.openai_api import OPENAI_ROUTER, openai_bench
from support.cluster.in_process import simulated
from support.engines.written_engine import HERMES_TEMPLATE, writes, written_engines

from baton.inference.v1 import cluster_service_pb2
from router.config import QuotaConfig, QuotasConfig
from router.openai.resumable.event_ids import Position
from router.resume.handle import Handle
from rpc.auth.access import AuthConfig

KEYS = [("ann", "client"), ("bob", "client")]


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
