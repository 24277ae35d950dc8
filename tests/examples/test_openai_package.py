"""OpenAI's own package for Node.js, unchanged, against a router: streams, tools, embeddings, errors, retries."""

import json
import os

import pytest
from support.clients.examples import WITHIN_SECONDS, Ended, Program
from support.clients.openai_api import OPENAI_ROUTER, openai_bench, url_of
from support.cluster.demo import demo_worker
from support.cluster.in_process import Bench, simulated
from support.engines.checkpoints import DEMO
from support.engines.written_engine import writes, written_engines

from baton.calls import unary
from baton.inference.v1 import embed_pb2
from router.config import QuotaConfig, QuotasConfig

pytestmark = WITHIN_SECONDS

PICTURE = DEMO / "examples" / "circle-and-square.png"
PROGRAM = Program("openai", ("node", "main.js"), ("node", "npm"))


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    PROGRAM.build()


async def run(running: Bench, monkeypatch: pytest.MonkeyPatch, *words: str) -> Ended:
    monkeypatch.setitem(os.environ, "BATON_OPENAI", url_of(running))
    return await PROGRAM.run(running.address, *words)


@pytest.mark.feature("chats", engine="pytorch", facade="openai")
@pytest.mark.feature("streaming", engine="pytorch", facade="openai")
async def test_a_streamed_chat_is_the_demonstrations_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with openai_bench(demo_worker("prefill"), demo_worker("decode")) as running:
        done = await run(running, monkeypatch, "stream", "Sort: pear apple mango")
    assert (done.code, done.out) == (0, "apple mango pear\n"), done.err
    assert done.err.endswith(" tokens\n")


async def test_a_tool_call_is_streamed_and_its_result_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    with written_engines():
        async with openai_bench(writes(answer)) as running:
            done = await run(running, monkeypatch, "tools", "The weather?")
    assert (done.code, done.out) == (0, f'tool_calls weather {{"city": "Oslo"}}\n{answer}\n'), done.err


async def test_an_object_is_parsed_and_a_picture_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async with openai_bench(demo_worker("encode"), demo_worker("prefill"), demo_worker("decode")) as running:
        parsed = await run(running, monkeypatch, "parse", "Tell me about Mia.")
        seen = await run(running, monkeypatch, "picture", str(PICTURE), "What is in the picture?")
    assert (parsed.code, parsed.out) in ((0, "string cat\n"), (0, "string dog\n")), parsed.err
    assert (seen.code, seen.out) == (0, "a red circle and a blue square\n"), seen.err


async def test_embeddings_are_those_of_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    async with openai_bench(simulated("e1", "embed")) as running:
        done = await run(running, monkeypatch, "embed", "one", "another")
        request = embed_pb2.EmbedRequest(inputs=[{"text": "one"}, {"text": "another"}])
        response = await unary(running.stub.Embed(request, timeout=60))
    assert [json.loads(line) for line in done.out.splitlines()] == [list(one.values) for one in response.embeddings]


async def test_refusals_are_the_packages_errors_and_what_may_be_retried_is(monkeypatch: pytest.MonkeyPatch) -> None:
    quotas = QuotasConfig(default=QuotaConfig(requests_per_second=2.0, burst_seconds=0.5))
    router = OPENAI_ROUTER.model_copy(update={"quotas": quotas})
    async with openai_bench(simulated("w1", "prefill", "decode")) as running:
        done = await run(running, monkeypatch, "errors")
    assert done.out.splitlines() == [
        "BadRequestError 400 invalid_request temperature",
        "NotFoundError 404 model_not_found null",
        "BadRequestError 400 unsupported best_of",
    ]
    async with openai_bench(simulated("w1", "prefill", "decode"), router=router) as running:
        await running.generate(prompt="x", stopping={"max_tokens": 1})
        retried = await run(running, monkeypatch, "retry", "x")
    assert (retried.code, retried.out) == (0, "length\n"), retried.err
