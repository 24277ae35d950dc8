"""The official `openai` package against the router: what it parses is what Baton answers by gRPC."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from structlog.testing import capture_logs
from support.clients.openai_api import ALONE, OPENAI_ROUTER, client_of, openai_bench, url_of
from support.cluster.in_process import Bench, bench, simulated
from support.engines.written_engine import HERMES_TEMPLATE, REASONING_TEMPLATE, writes, written_engines
from support.eventually import eventually
from support.log_fields import merge_log_fields

from discovery.memory import MemoryRegistry
from router.config import OpenAIConfig, QuotaConfig, QuotasConfig
from router.server import host_router
from rpc.auth.access import AuthConfig

MESSAGES: Any = [{"role": "user", "content": "hello"}]
CHAT = {"messages": [{"role": "user", "parts": [{"text": "hello"}]}]}
SEEDED: Any = {"temperature": 1.0, "seed": 7}
KEYS = [("ann", "client"), ("bob", "client"), ("cook", "worker")]
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather", "parameters": {"type": "object", "properties": {}}},
}


def key_client(address: str, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key=key, max_retries=0, default_headers=ALONE)


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


@pytest.mark.feature("tools", engine="written", facade="openai")
async def test_tools_are_called_whole_and_streamed() -> None:
    answer = 'On it.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    with written_engines():
        async with openai_bench(writes(answer)) as running:
            client = client_of(running)
            whole = await client.chat.completions.create(model="demo", messages=MESSAGES, tools=[TOOL])
            (call,) = whole.choices[0].message.tool_calls or []
            assert call.type == "function"
            assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Oslo"}')
            assert (whole.choices[0].finish_reason, whole.choices[0].message.content) == ("tool_calls", "On it.")
            async with client.chat.completions.stream(model="demo", messages=MESSAGES, tools=[TOOL]) as stream:
                final = (await stream.get_final_completion()).choices[0]
            (streamed,) = final.message.tool_calls or []
            assert (streamed.function.name, final.finish_reason) == ("weather", "tool_calls")
            turns = [
                *MESSAGES,
                whole.choices[0].message.model_dump(),
                {"role": "tool", "tool_call_id": call.id, "content": "rain"},
                final.message.model_dump(),
                {"role": "tool", "tool_call_id": streamed.id, "content": "rain"},
            ]
            again = await client.chat.completions.create(model="demo", messages=turns, tools=[TOOL])
            assert again.usage is not None
            assert whole.usage is not None
            assert again.usage.prompt_tokens > whole.usage.prompt_tokens
            silent = await client.chat.completions.create(
                model="demo", messages=MESSAGES, tools=[TOOL], tool_choice="none"
            )
            assert silent.choices[0].message.content == answer


@pytest.mark.feature("tool arguments as they come", engine="written", facade="openai")
async def test_arguments_come_as_they_are_written() -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "%s"}}</tool_call>'
    asked: Any = {"model": "demo", "messages": MESSAGES, "tools": [TOOL], "stream": True}
    with written_engines():
        async with openai_bench(writes("On it." + call % "Oslo" + call % "Rome", token_seconds=0.002)) as running:
            create = client_of(running).chat.completions.create
            chunks = [chunk async for chunk in await create(**asked)]
            cut = [chunk async for chunk in await create(max_tokens=60, **asked)]
    pieces: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in chunks:
        for piece in chunk.choices[0].delta.tool_calls or []:
            pieces[piece.index].append(piece)
    for index, city in enumerate(("Oslo", "Rome")):
        assert json.loads("".join(piece.function.arguments for piece in pieces[index])) == {"city": city}
        assert [piece.function.name for piece in pieces[index] if piece.id] == ["weather"]
        assert len(pieces[index]) > 1
    assert (chunks[-1].choices[0].finish_reason, cut[-1].choices[0].finish_reason) == ("tool_calls", "length")


TWO_CALLS = {
    HERMES_TEMPLATE: 'On it.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>' + 1000 * "Done.",
    HERMES_TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]"): 'On it.[TOOL_CALLS][{"name": "weather", "arguments": '
    '{"city": "Oslo"}}, {"name": "weather", "arguments": {"city": "Rome"}}]',
    HERMES_TEMPLATE.replace("<tool_call>", "<|python_tag|>"): '{"name": "weather", "parameters": {"city": "Oslo"}}; '
    '{"name": "weather", "parameters": {"city": "Rome"}}',
}


@pytest.mark.parametrize(("template", "answer"), TWO_CALLS.items(), ids=["hermes", "mistral", "llama"])
async def test_without_parallel_calls_the_first_call_ends_the_answer(template: str, answer: str) -> None:
    with written_engines():
        async with openai_bench(writes(answer, template)) as running:
            client = client_of(running)
            request: Any = {"model": "demo", "messages": MESSAGES, "tools": [TOOL]}
            both = await client.chat.completions.create(**request, parallel_tool_calls=True)
            one = await client.chat.completions.create(**request, parallel_tool_calls=False)
            async with client.chat.completions.stream(**request, parallel_tool_calls=False) as stream:
                streamed = await stream.get_final_completion()
            raw: Any = {"separate_reasoning": False}
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**request, parallel_tool_calls=False, extra_body=raw)
    assert len(both.choices[0].message.tool_calls or []) == 2
    for found in (one, streamed):
        (call,) = found.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert json.loads(call.function.arguments) == {"city": "Oslo"}
        assert found.choices[0].finish_reason == "tool_calls"
    assert refused.value.param == "parallel_tool_calls"


async def test_fields_that_a_client_adds_to_an_answer_are_read_over_when_they_come_back(served: Bench) -> None:
    extra = {"provider_specific_fields": {"refusal": None}}
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}", **extra}, **extra}
    turns: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call], **extra},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    answer = await client_of(served).chat.completions.create(model="demo", messages=turns, max_tokens=3)
    assert answer.usage is not None
    assert answer.usage.completion_tokens


async def test_a_streamed_call_has_no_empty_chunks() -> None:
    answer = '<tool_call>{"name": "weather", "arguments": {"city": "the </tool_call> of Oslo"}}</tool_call>'
    with written_engines():
        async with openai_bench(writes(answer)) as running:
            stream = await client_of(running).chat.completions.create(
                model="demo", messages=MESSAGES, tools=[TOOL], stream=True
            )
            deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) async for chunk in stream]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [list(delta) for delta in deltas[1:]] == [["tool_calls"], []]
    function = deltas[1]["tool_calls"][0]["function"]
    assert json.loads(function["arguments"]) == {"city": "the </tool_call> of Oslo"}


@pytest.mark.feature("reasoning", engine="written", facade="openai")
async def test_reasoning_is_apart_from_the_content() -> None:
    with written_engines():
        async with openai_bench(writes("hm</think>\nYes.", REASONING_TEMPLATE)) as running:
            client = client_of(running)
            message = (await client.chat.completions.create(model="demo", messages=MESSAGES)).choices[0].message
            assert (message.content, message.reasoning_content) == ("Yes.", "hm")  # type: ignore[attr-defined]
            stream = await client.chat.completions.create(model="demo", messages=MESSAGES, stream=True)
            deltas = [chunk.choices[0].delta async for chunk in stream]
            assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm"


@pytest.mark.feature("Responses API", engine="written", facade="openai")
async def test_the_reasoning_of_a_response_is_an_item_of_its_own() -> None:
    with written_engines():
        async with openai_bench(writes("hm</think>\nYes.", REASONING_TEMPLATE)) as running:
            client = client_of(running)
            whole = await client.responses.create(model="demo", input="hello")
            async with client.responses.stream(model="demo", input="hello") as helper:
                events = [event async for event in helper]
                streamed = await helper.get_final_response()
            for response in (whole, streamed):
                assert [item.type for item in response.output] == ["reasoning", "message"]
                assert response.output[0].content[0].text == "hm"  # type: ignore[union-attr, index]
                assert response.output_text == "Yes."
            deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
            assert "".join(deltas) == "hm"
            # A client sends back what it got.
            turns: Any = [*MESSAGES, *(item.model_dump(exclude_none=True) for item in whole.output), *MESSAGES]
            again = await client.responses.create(model="demo", input=turns)
            assert again.output_text == "Yes."


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("temperature", {"temperature": -1.0}, "temperature"),
    ("max_tokens", {"max_tokens": 0}, "max_tokens"),
    ("n", {"n": 99}, "n"),
    ("unknown field", {"extra_body": {"frequncy": 1}}, "frequncy"),
    ("unknown field, guided", {"extra_body": {"guided_choice": ["a"]}}, "guided_choice"),
    ("top_logprobs alone", {"top_logprobs": 3}, "top_logprobs"),
    ("a string for a number", {"extra_body": {"top_p": "1"}}, "top_p"),
    ("message content", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ("messages", {"messages": []}, "messages"),
    ("role", {"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "fields", "param"), REFUSED, ids=[what for what, _, _ in REFUSED])
async def test_a_wrong_field_is_named(served: Bench, what: str, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client_of(served).chat.completions.create(**{"model": "demo", "messages": MESSAGES, **fields})
    assert (refused.value.param, refused.value.type) == (param, "invalid_request_error")


UNSUPPORTED: list[tuple[str, dict[str, Any]]] = [
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("tools", {"tools": [TOOL]}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": "required"}),
    ("image", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]}),
]


@pytest.mark.parametrize(("what", "fields"), UNSUPPORTED, ids=[what for what, _ in UNSUPPORTED])
async def test_what_the_model_cannot_do_is_refused(served: Bench, what: str, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client_of(served).chat.completions.create(**{"model": "demo", "messages": MESSAGES, **fields})
    assert refused.value.code == "unsupported"


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "judge", "content": "x"}, "input[0].role"),
        ({"type": "reasoning", "contents": []}, "input[0].contents"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text"),
        ({"type": "web_search_call"}, "input[0].type"),
    ],
)
async def test_a_wrong_item_of_a_response_is_named(served: Bench, item: dict[str, Any], param: str) -> None:
    wrong: Any = [item]
    with pytest.raises(openai.BadRequestError) as refused:
        await client_of(served).responses.create(model="demo", input=wrong)
    assert param in [part.partition(": ")[0] for part in str(refused.value.body["message"]).split("; ")]  # type: ignore[index]


async def test_best_of_and_embeddings_of_a_model_without_them_are_refused(served: Bench) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client_of(served).completions.create(model="demo", prompt="x", best_of=3)
    assert (refused.value.param, refused.value.code) == ("best_of", "unsupported")
    with pytest.raises(openai.BadRequestError, match="embeddings"):
        await client_of(served).embeddings.create(model="demo", input="x")


async def test_an_unknown_model_is_not_found(served: Bench) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        await client_of(served).chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert refused.value.code == "model_not_found"


@pytest.mark.feature("quotas of tenants", engine="simulated", facade="openai")
async def test_api_keys_are_tenants_with_their_quotas(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    entries = [{"name": name, "token": name[0] * 20, "role": role} for name, role in KEYS]
    keys.write_text(json.dumps({"tokens": entries}))
    quotas = QuotasConfig(tenants={"ann": QuotaConfig(requests_per_second=0.01, burst_seconds=100)})
    update = {"auth": AuthConfig(tokens_file=keys), "quotas": quotas}
    async with host_router(OPENAI_ROUTER.model_copy(update=update), MemoryRegistry("test")) as router:
        ann, bob, cook, eve = (key_client(router.openai_address, key * 20) for key in "abce")
        assert [model.id async for model in bob.models.list()] == []
        with pytest.raises(openai.AuthenticationError):
            await eve.models.list()
        with pytest.raises(openai.PermissionDeniedError):
            await cook.models.list()
        with pytest.raises(openai.NotFoundError):
            await ann.completions.create(model="demo", prompt="x")
        with pytest.raises(openai.RateLimitError):
            await ann.completions.create(model="demo", prompt="x")
        with pytest.raises(openai.NotFoundError):
            await bob.completions.create(model="demo", prompt="x")


async def test_a_tenant_over_its_quota_is_told_when_to_retry(served: Bench) -> None:
    quotas = QuotasConfig(default=QuotaConfig(requests_per_second=2.0, burst_seconds=0.5))
    router = OPENAI_ROUTER.model_copy(update={"quotas": quotas})
    async with openai_bench(simulated("w1", "prefill", "decode"), router=router) as running:
        # Many at once: however slow this machine is, some come before the quota has room again.
        client = client_of(running)
        asked = [client.completions.create(model="demo", prompt="x", max_tokens=1) for _ in range(12)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        refused = [one for one in answers if isinstance(one, openai.RateLimitError)]
        assert refused
        assert len(refused) < len(answers)
        assert all(int(one.response.headers["retry-after-ms"]) <= 500 for one in refused)
        patient = client_of(running, max_retries=3)
        assert (await patient.completions.create(model="demo", prompt="x", max_tokens=1)).choices


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


async def test_a_failure_within_a_stream_is_raised_by_the_client() -> None:
    slow = {"decode_step_seconds": 0.02}
    workers = simulated("p1", "prefill", **slow), simulated("d1", "decode", **slow)
    async with openai_bench(*workers, proxied=True) as running:
        stream = await client_of(running).chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=4000, stream=True
        )
        await anext(aiter(stream))
        await running.proxies["d1"].cut()
        with pytest.raises(openai.APIError) as failed:
            [chunk async for chunk in stream]
        assert failed.value.code in ("worker_unavailable", "no_worker")


async def test_a_failure_within_a_response_is_an_event_of_the_type_error() -> None:
    slow = {"decode_step_seconds": 0.02}
    workers = simulated("p1", "prefill", **slow), simulated("d1", "decode", **slow)
    async with openai_bench(*workers, proxied=True) as running, httpx2.AsyncClient(trust_env=False, timeout=30) as http:
        body = {"model": "demo", "input": "hi", "max_output_tokens": 4000, "stream": True}
        async with http.stream("POST", f"{url_of(running)}/responses", json=body) as answer:
            events: list[dict[str, Any]] = []
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    events.append(json.loads(line.removeprefix("data: ")))
                    if events[-1]["type"] == "response.output_text.delta":
                        await running.proxies["d1"].cut()
    numbers = [event["sequence_number"] for event in events]
    assert (events[-1]["type"], numbers) == ("error", [*range(len(events))])
    assert events[-1]["code"] in ("worker_unavailable", "no_worker")
    assert events[-1]["message"] == events[-1]["error"]["message"]


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


async def test_a_body_over_the_limit_is_refused() -> None:
    openai_config = OpenAIConfig(listen="127.0.0.1:0", max_body_bytes=2048)
    router = OPENAI_ROUTER.model_copy(update={"openai": openai_config})
    async with openai_bench(simulated("w1", "prefill", "decode"), router=router) as running:
        with pytest.raises(openai.APIStatusError) as refused:
            await client_of(running).completions.create(model="demo", prompt="x" * 4096, max_tokens=1)
        assert refused.value.status_code == 413
