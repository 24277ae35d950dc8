"""Anthropic's own package for Node.js, unchanged, against a router: streams, tools, thinking, errors, retries."""

import os

import pytest
from support.clients.examples import WITHIN_SECONDS, Ended, Program
from support.clients.openai_api import OPENAI_ROUTER, openai_bench
from support.cluster.demo import demo_worker
from support.cluster.in_process import Bench, simulated
from support.engines.checkpoints import DEMO
from support.engines.written_engine import REASONING_TEMPLATE, writes, written_engines

from router.config import QuotaConfig, QuotasConfig

pytestmark = WITHIN_SECONDS

PICTURE = DEMO / "examples" / "circle-and-square.png"
PROGRAM = Program("anthropic", ("node", "main.js"), ("node", "npm"))


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    PROGRAM.build()


async def run(running: Bench, monkeypatch: pytest.MonkeyPatch, *words: str) -> Ended:
    monkeypatch.setitem(os.environ, "BATON_ANTHROPIC", f"http://{running.openai_address}")
    return await PROGRAM.run(running.address, *words)


@pytest.mark.feature("chats", engine="pytorch", facade="anthropic")
@pytest.mark.feature("streaming", engine="pytorch", facade="anthropic")
async def test_a_streamed_message_is_the_demonstrations_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with openai_bench(demo_worker("encode"), demo_worker("prefill"), demo_worker("decode")) as running:
        done = await run(running, monkeypatch, "stream", "Sort: pear apple mango")
        seen = await run(running, monkeypatch, "picture", str(PICTURE), "What is in the picture?")
    assert (done.code, done.out) == (0, "apple mango pear\n"), done.err
    assert done.err.endswith(" tokens\n")
    assert (seen.code, seen.out) == (0, "a red circle and a blue square\n"), seen.err


async def test_a_tool_call_is_streamed_and_its_result_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    with written_engines():
        async with openai_bench(writes(answer)) as running:
            done = await run(running, monkeypatch, "tools", "The weather?")
    assert (done.code, done.out) == (0, f'tool_use weather {{"city":"Oslo"}}\n{answer}\n'), done.err


async def test_thinking_comes_before_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with written_engines():
        async with openai_bench(writes("hm</think>\nYes.", REASONING_TEMPLATE)) as running:
            done = await run(running, monkeypatch, "think", "Is it?")
    assert (done.code, done.out) == (0, "thinking: hm\ntext: Yes.\n"), done.err


async def test_tokens_are_counted_and_models_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with openai_bench(simulated("w1", "prefill", "decode")) as running:
        counted = await run(running, monkeypatch, "count", "How many?")
        listed = await run(running, monkeypatch, "models")
    assert (counted.out, listed.out) == ("true\n", "demo model\n"), counted.err + listed.err


async def test_refusals_are_the_packages_errors_and_what_may_be_retried_is(monkeypatch: pytest.MonkeyPatch) -> None:
    quotas = QuotasConfig(default=QuotaConfig(requests_per_second=2.0, burst_seconds=0.5))
    router = OPENAI_ROUTER.model_copy(update={"quotas": quotas})
    async with openai_bench(simulated("w1", "prefill", "decode")) as running:
        done = await run(running, monkeypatch, "errors")
    assert [line.partition(":")[0] for line in done.out.splitlines()] == [
        "BadRequestError 400 invalid_request_error temperature",
        "NotFoundError 404 not_found_error no worker serves 'no-such-model'; served are demo",
        "BadRequestError 400 invalid_request_error container",
    ]
    async with openai_bench(simulated("w1", "prefill", "decode"), router=router) as running:
        await running.generate(prompt="x", stopping={"max_tokens": 1})
        retried = await run(running, monkeypatch, "retry", "x")
    assert (retried.code, retried.out) == (0, "max_tokens\n"), retried.err
