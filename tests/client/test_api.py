"""The Python client against a real router."""

from contextlib import aclosing

import pytest
from baton.inference.v1 import generate_pb2
from support.baton_command import SmallCluster
from support.worker_views import eventually

from client.api import Client
from rpc.errors import InvalidRequest, RequestNotFound, Unavailable


async def test_a_string_is_a_prompt(cluster: SmallCluster) -> None:
    async with Client(cluster.address) as client, aclosing(client.generate("hello")) as events:
        async for event in events:
            assert event.started.prompt_tokens == 5
            break


async def test_leaving_the_stream_frees_the_blocks(cluster: SmallCluster) -> None:
    async with Client(cluster.address) as client:
        async with aclosing(client.generate("hello")) as events:
            async for event in events:
                if event.HasField("token"):
                    break
        await eventually(lambda: not cluster.blocks_used)


async def test_a_refusal_is_an_invalid_request_with_its_fields(cluster: SmallCluster) -> None:
    async with Client(cluster.address) as client:
        with pytest.raises(InvalidRequest) as refused:
            [event async for event in client.generate("")]
    assert [violation.field for violation in refused.value.violations] == ["prompt"]


async def test_tokenize_gives_the_ids_that_generate_would_run(cluster: SmallCluster) -> None:
    async with Client(cluster.address) as client:
        assert list(await client.tokenize("hi")) == [104, 105]


async def test_cancel_returns_what_each_stage_confirmed(cluster: SmallCluster) -> None:
    request = generate_pb2.GenerateRequest(request_id="one", prompt="hello")
    async with Client(cluster.address) as client, aclosing(client.generate(request)) as events:
        async for event in events:
            if event.HasField("token"):
                break
        receipts = await client.cancel("one")
    assert "decode-0" in {receipt.worker_id for receipt in receipts}


async def test_cancelling_what_does_not_run_is_request_not_found(cluster: SmallCluster) -> None:
    async with Client(cluster.address) as client:
        with pytest.raises(RequestNotFound):
            await client.cancel("never")


async def test_a_router_that_is_not_there_is_unavailable() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(Unavailable):
            await client.models()
