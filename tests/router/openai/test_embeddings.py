"""`/v1/embeddings` by the official client: its vectors are those of Embed by gRPC."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from support.clients.openai_api import client_of, openai_bench, post
from support.cluster.in_process import Bench, simulated
from support.lifetimes import in_one_task

from baton.calls import unary
from baton.inference.v1 import embed_pb2


@pytest.fixture
async def served() -> AsyncIterator[Bench]:
    async with in_one_task(openai_bench(simulated("e1", "embed", max_context_tokens=64))) as running:
        yield running


async def by_grpc(running: Bench, *texts: str, **fields: Any) -> list[list[float]]:
    request = embed_pb2.EmbedRequest(inputs=[{"text": text} for text in texts], **fields)
    response = await unary(running.stub.Embed(request, timeout=60))
    return [list(one.values) for one in response.embeddings]


@pytest.mark.parametrize("encoding", ["float", "base64"])
@pytest.mark.feature("embeddings of texts", engine="simulated", facade="openai")
async def test_several_texts_are_answered_in_order_in_both_encodings(served: Bench, encoding: Any) -> None:
    # The client asks for base64 unless it is told otherwise, and decodes it.
    asked: Any = {} if encoding == "base64" else {"encoding_format": "float"}
    answer = await client_of(served).embeddings.create(model="demo", input=["one", "another"], dimensions=7, **asked)
    assert [one.embedding for one in answer.data] == await by_grpc(served, "one", "another", dimensions=7)
    assert [one.index for one in answer.data] == [0, 1]
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens, answer.model) == (10, 10, "demo")


async def test_a_text_and_its_token_ids_are_the_same(served: Bench) -> None:
    client = client_of(served)
    inputs: list[Any] = ["ab", list(b"ab"), ["ab"], [list(b"ab")]]
    answers = [await client.embeddings.create(model="demo", input=one) for one in inputs]
    assert len({tuple(answer.data[0].embedding) for answer in answers}) == 1


async def test_wrong_fields_are_named_in_openais_words(served: Bench) -> None:
    client = client_of(served)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.embeddings.create(model="demo", input=["fine", "x" * 65])
    assert caught.value.param == "input[1]"
    with pytest.raises(openai.BadRequestError) as of_dimensions:
        await client.embeddings.create(model="demo", input="x", dimensions=65)
    assert of_dimensions.value.param == "dimensions"
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model="other", input="x")
    wrong: list[Any] = [
        {},
        *({"input": one} for one in (5, [], [["x"]], [-1], ["x", 5])),
        {"input": "x", "dimensions": 0},
    ]
    for body in wrong:
        assert (await post(served, "/embeddings", {"model": "demo", **body})).status_code == 400
