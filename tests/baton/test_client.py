"""The Python client against a real router."""

import asyncio
import json
from contextlib import aclosing

import pytest
from support.clients.baton_command import SmallCluster
from support.eventually import eventually

from baton import AsyncClient, Resume
from baton.errors import Cancelled, InvalidRequest, RequestNotFound, Unavailable, Unsupported
from baton.generation.requests import generate
from baton.inference.v1 import generate_pb2


async def test_a_string_is_a_prompt(cluster: SmallCluster) -> None:
    async with AsyncClient(cluster.address) as client, aclosing(client.generate("hello")) as events:
        async for event in events:
            assert event.started.prompt_tokens == 5
            break


async def test_leaving_the_stream_frees_the_blocks(cluster: SmallCluster) -> None:
    async with AsyncClient(cluster.address) as client:
        async with aclosing(client.generate("hello")) as events:
            async for event in events:
                if event.HasField("token"):
                    break
        await eventually(lambda: not cluster.blocks_used)


@pytest.mark.parametrize("resume", [None, Resume(keep_seconds=3.0)], ids=["plain", "kept"])
async def test_closing_the_client_ends_its_running_answers(cluster: SmallCluster, resume: Resume | None) -> None:
    client, begun = AsyncClient(cluster.address, resume=resume), asyncio.Event()
    request = generate_pb2.GenerateRequest(prompt="hello", stopping={"max_tokens": 4000, "ignore_eos": True})

    async def read() -> None:
        async for event in client.generate(request):
            if event.HasField("token"):
                begun.set()

    reading = asyncio.ensure_future(read())
    await begun.wait()
    await client.close()
    with pytest.raises(Cancelled):
        await reading
    await eventually(lambda: not cluster.blocks_used)


async def test_a_refusal_is_an_invalid_request_with_its_fields(cluster: SmallCluster) -> None:
    async with AsyncClient(cluster.address) as client:
        with pytest.raises(InvalidRequest) as refused:
            [event async for event in client.generate("")]
    assert [violation.field for violation in refused.value.violations] == ["prompt"]


async def test_tokenize_gives_the_ids_that_generate_would_run(cluster: SmallCluster) -> None:
    async with AsyncClient(cluster.address) as client:
        assert list(await client.tokenize("hi")) == [104, 105]


async def test_cancel_returns_what_each_stage_confirmed(cluster: SmallCluster) -> None:
    request = generate_pb2.GenerateRequest(request_id="one", prompt="hello")
    async with AsyncClient(cluster.address) as client, aclosing(client.generate(request)) as events:
        async for event in events:
            if event.HasField("token"):
                break
        receipts = await client.cancel("one")
    assert "decode-0" in {receipt.worker_id for receipt in receipts}


async def test_cancelling_what_does_not_run_is_request_not_found(cluster: SmallCluster) -> None:
    async with AsyncClient(cluster.address) as client:
        with pytest.raises(RequestNotFound):
            await client.cancel("never")


async def test_a_router_that_is_not_there_is_unavailable() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(Unavailable):
            await client.models()


async def test_how_many_tokens_come_together_reaches_the_router(cluster: SmallCluster) -> None:
    async with AsyncClient(cluster.address) as client:
        assert await client.generate("hello", max_tokens=5, min_tokens_per_message=4).text()
        with pytest.raises(InvalidRequest, match=r"response\.min_tokens_per_message"):
            await client.generate("hello", min_tokens_per_message=1025).text()


async def test_grammars_become_the_field_guided() -> None:
    def made(**options: object) -> generate_pb2.GuidedDecoding:
        return generate("x", **options).request.guided  # type: ignore[arg-type]

    assert json.loads(made(json_schema={"type": "object"}).json_schema) == {"type": "object"}
    assert made(json_schema="true").json_schema == "true"
    assert made(regex="a+").regex == "a+"
    assert made(choice=["yes", "no"]).choice.texts == ["yes", "no"]
    assert made(grammar='start: "a"').grammar == 'start: "a"'
    assert not generate("x").request.HasField("guided")
    with pytest.raises(ValueError, match="one grammar"):
        made(regex="a", choice=["b"])
    with pytest.raises(ValueError, match="options go with a prompt"):
        generate(generate_pb2.GenerateRequest(prompt="x"), regex="a")


async def test_a_grammar_that_the_model_cannot_follow_is_unsupported(cluster: SmallCluster) -> None:
    async with AsyncClient(cluster.address) as client:
        with pytest.raises(Unsupported, match="guided decoding"):
            await client.generate("hello", regex="a+").text()
