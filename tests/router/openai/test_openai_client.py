"""The official `openai` package against the router: what it parses is what Baton answers by gRPC."""

import asyncio
from typing import Any

import openai
import pytest
from structlog.testing import capture_logs
from support.clients.openai_api import client_of, openai_bench
from support.cluster.in_process import Bench, bench, simulated
from support.eventually import eventually
from support.log_fields import merge_log_fields

MESSAGES: Any = [{"role": "user", "content": "hello"}]
CHAT = {"messages": [{"role": "user", "parts": [{"text": "hello"}]}]}
SEEDED: Any = {"temperature": 1.0, "seed": 7}


@pytest.mark.feature("chats", engine="simulated", facade="openai")
@pytest.mark.feature("whole answers", engine="simulated", facade="openai")
@pytest.mark.feature("seeds", engine="simulated", facade="openai")
async def test_a_chat_completion_is_what_grpc_answers(served: Bench) -> None:
    stream = await served.generate(chat=CHAT, sampling=SEEDED, stopping={"max_tokens": 20})
    answer = await client_of(served).chat.completions.create(model="demo", messages=MESSAGES, max_tokens=20, **SEEDED)
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (stream.text, "assistant", "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (stream.started.prompt_tokens, 20)
    assert (answer.model, answer.object) == ("demo", "chat.completion")


@pytest.mark.feature("streaming", engine="simulated", facade="openai")
async def test_a_streamed_chat_has_the_same_text_and_ends_with_the_usage(served: Bench) -> None:
    client = client_of(served)
    whole = await client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=20, **SEEDED)
    stream = await client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=20, stream=True, stream_options={"include_usage": True}, **SEEDED
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == ["length"]
    last, used = chunks[-1].usage, whole.usage
    assert last is not None
    assert used is not None
    assert chunks[-1].choices == []
    assert (last.prompt_tokens, last.completion_tokens) == (used.prompt_tokens, used.completion_tokens)
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_stream_without_the_option_has_no_usage(served: Bench) -> None:
    stream = await client_of(served).chat.completions.create(model="demo", messages=MESSAGES, max_tokens=5, stream=True)
    assert {chunk.usage async for chunk in stream} == {None}


@pytest.mark.feature("several answers", engine="simulated", facade="openai")
async def test_several_answers_are_choices(served: Bench) -> None:
    client = client_of(served)
    whole = await client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=8, n=3, **SEEDED)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = {0: "", 1: "", 2: ""}
    ends = {}
    stream = await client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=8, n=3, stream=True, **SEEDED
    )
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert list(texts.values()) == [choice.message.content for choice in whole.choices]
    assert ends == {0: "length", 1: "length", 2: "length"}


@pytest.mark.feature("logprobs", engine="simulated", facade="openai")
async def test_logprobs_are_of_each_token(served: Bench) -> None:
    answer = await client_of(served).chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=6, logprobs=True, top_logprobs=2, **SEEDED
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert "".join(one.token for one in found.content) == answer.choices[0].message.content
    assert {len(one.top_logprobs) for one in found.content} == {2}


@pytest.mark.feature("text prompts", engine="simulated", facade="openai")
@pytest.mark.feature("token ids as the prompt", engine="simulated", facade="openai")
async def test_a_completion_takes_texts_and_ids(served: Bench) -> None:
    client = client_of(served)
    by_grpc = await served.text_of(prompt="hello", sampling=SEEDED, stopping={"max_tokens": 12})
    prompts: list[Any] = ["hello", ["hello"], list(b"hello"), [list(b"hello")]]
    for prompt in prompts:
        answer = await client.completions.create(model="demo", prompt=prompt, max_tokens=12, **SEEDED)
        assert answer.choices[0].text == by_grpc
    stream = await client.completions.create(model="demo", prompt="hello", max_tokens=12, stream=True, **SEEDED)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == by_grpc
    logged = await client.completions.create(model="demo", prompt="hello", max_tokens=12, logprobs=2, **SEEDED)
    assert logged.choices[0].logprobs is not None
    assert "".join(logged.choices[0].logprobs.tokens or []) == by_grpc


@pytest.mark.feature("stop strings", engine="simulated", facade="openai")
async def test_a_stop_string_and_fields_beyond_openais_reach_the_engine(served: Bench) -> None:
    client = client_of(served)
    text = await served.text_of(prompt="hello", sampling=SEEDED, stopping={"max_tokens": 40})
    answer = await client.completions.create(model="demo", prompt="hello", max_tokens=40, stop=text[20:24], **SEEDED)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text[: text.index(text[20:24])], "stop")
    more = {"min_tokens": 4, "top_k": 5, "min_p": 0.1, "stop_token_ids": [ord(text[9])]}
    stopped = await client.completions.create(model="demo", prompt="hello", max_tokens=40, extra_body=more, **SEEDED)
    assert stopped.usage is not None
    assert stopped.usage.completion_tokens >= 4


@pytest.mark.feature("Responses API", engine="simulated", facade="openai")
async def test_a_response_is_the_same_text_whole_and_streamed(served: Bench) -> None:
    client = client_of(served)
    whole = await client.responses.create(model="demo", input="hello", instructions="Be brief.", max_output_tokens=16)
    assert (whole.status, len(whole.output_text)) == ("incomplete", 16)
    assert whole.usage is not None
    assert whole.usage.output_tokens == 16
    stream = await client.responses.create(
        model="demo", input=[{"role": "user", "content": "hello"}], max_output_tokens=16, stream=True
    )
    events = [event async for event in stream]
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == deltas
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.feature("model list", engine="simulated", facade="openai")
async def test_the_models_are_listed(served: Bench) -> None:
    client = client_of(served)
    assert [model.id async for model in client.models.list()] == ["demo"]
    assert (await client.models.retrieve("demo")).owned_by == "baton"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other/one")


async def test_the_request_id_is_on_the_response_and_in_the_log(served: Bench) -> None:
    with capture_logs(processors=[merge_log_fields]) as lines:
        answer = await client_of(served).chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=7, extra_headers={"x-request-id": "mine"}
        )
    assert (answer.id, answer._request_id) == ("chatcmpl-mine", "mine")
    (line,) = [line for line in lines if line.get("method") == "/openai/v1/chat/completions"]
    expected = {"request_id": "mine", "code": "OK", "outcome": "OK", "completion_tokens": 7, "model": "demo"}
    assert expected.items() <= line.items()


@pytest.mark.feature("cancellation", engine="simulated", facade="openai")
async def test_a_client_that_leaves_stops_its_request() -> None:
    slow = {"decode_step_seconds": 0.02}
    workers = simulated("p1", "prefill", **slow), simulated("d1", "decode", **slow)
    async with openai_bench(*workers, proxied=True) as running:
        client = client_of(running)
        stream = await client.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=4000, n=2, stream=True
        )
        async for _ in stream:
            break
        assert running.used_blocks() > 0
        await stream.close()
        await eventually(lambda: running.used_blocks() == 0)
        whole = asyncio.create_task(client.completions.create(model="demo", prompt="x", max_tokens=4000))
        await eventually(lambda: running.used_blocks() > 0)
        whole.cancel()
        await eventually(lambda: running.used_blocks() == 0)


async def test_the_offsets_of_a_stream_are_those_of_the_whole_text(served: Bench) -> None:
    client = client_of(served)
    asked: dict[str, Any] = {"model": "demo", "prompt": "hello", "max_tokens": 12, "logprobs": 1, "n": 2, **SEEDED}
    whole = await client.completions.create(**asked)
    streamed: dict[int, list[int]] = {0: [], 1: []}
    async for chunk in await client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += (choice.logprobs and choice.logprobs.text_offset) or []
    assert streamed == {one.index: one.logprobs and one.logprobs.text_offset for one in whole.choices}
    assert len(set(streamed[0])) > 1


async def test_a_router_without_the_option_serves_no_http() -> None:
    async with bench(simulated("w1", "prefill", "decode")) as running:
        assert running.openai_address == ""
