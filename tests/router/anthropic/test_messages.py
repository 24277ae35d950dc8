"""The official `anthropic` package against the router: what it parses is what Baton answers by gRPC."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import anthropic
import pytest
from structlog.testing import capture_logs
from support.certificates import Authority
from support.clients.anthropic_api import anthropic_of, post_message
from support.clients.openai_api import OPENAI_ROUTER, client_of, openai_bench, tools_worker
from support.cluster.demo import demo_worker
from support.cluster.in_process import Bench, simulated
from support.engines.checkpoints import DEMO
from support.engines.written_engine import HERMES_TEMPLATE, REASONING_TEMPLATE, writes, written_engines
from support.eventually import eventually
from support.log_fields import merge_log_fields
from support.servers.https import ok, web

from media.config import FetchConfig, MediaConfig
from router.config import AdmissionConfig, QuotaConfig, QuotasConfig
from rpc.auth.access import AuthConfig

MESSAGES: Any = [{"role": "user", "content": "hello"}]
CHAT = {"messages": [{"role": "user", "parts": [{"text": "hello"}]}]}
# The package has no temperature of its own any more; other clients of the API send it.
GREEDY: Any = {"model": "demo", "extra_body": {"temperature": 0.0}}
BODY: Any = {"model": "demo", "temperature": 0.0, "messages": [{"role": "user", "content": "hello"}]}
PICTURE = DEMO / "examples" / "circle-and-square.png"
SEEN = "a red circle and a blue square"


@pytest.mark.feature("chats", engine="simulated", facade="anthropic")
@pytest.mark.feature("whole answers", engine="simulated", facade="anthropic")
async def test_a_message_is_what_grpc_answers(served: Bench) -> None:
    stream = await served.generate(chat=CHAT, sampling={"temperature": 0}, stopping={"max_tokens": 20})
    answer = await anthropic_of(served).messages.create(messages=MESSAGES, max_tokens=20, **GREEDY)
    [block] = answer.content
    assert block.type == "text"
    assert (block.text, answer.role, answer.stop_reason) == (stream.text, "assistant", "max_tokens")
    cached = answer.usage.cache_read_input_tokens or 0
    assert (answer.usage.input_tokens + cached, answer.usage.output_tokens) == (stream.started.prompt_tokens, 20)
    assert (answer.model, answer.type) == ("demo", "message")


@pytest.mark.feature("streaming", engine="simulated", facade="anthropic")
async def test_a_streamed_message_has_the_same_text_and_its_events_in_order(served: Bench) -> None:
    client = anthropic_of(served)
    whole = await client.messages.create(messages=MESSAGES, max_tokens=20, **GREEDY)
    async with client.messages.stream(messages=MESSAGES, max_tokens=20, **GREEDY) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert [block.text for block in whole.content if block.type == "text"] == [text]
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 20)
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) == whole.usage.input_tokens
    events = (await client.messages.create(messages=MESSAGES, max_tokens=3, stream=True, **GREEDY)).__aiter__()
    kinds = [event.type async for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


async def test_a_stream_has_a_ping(served: Bench) -> None:
    body = {**BODY, "max_tokens": 2, "stream": True}
    text = (await post_message(served, body)).text
    names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    assert names[:3] == ["message_start", "ping", "content_block_start"]


@pytest.mark.feature("stop strings", engine="simulated", facade="anthropic")
async def test_a_stop_sequence_is_named(served: Bench) -> None:
    text = await served.text_of(chat=CHAT, sampling={"temperature": 0}, stopping={"max_tokens": 40})
    answer = await anthropic_of(served).messages.create(
        messages=MESSAGES, max_tokens=40, stop_sequences=[text[20:24]], **GREEDY
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", text[20:24])
    assert answer.content[0].type == "text"
    assert answer.content[0].text == text[: text.index(text[20:24])]


async def test_an_answer_that_fills_the_context_says_so() -> None:
    with written_engines():
        async with openai_bench(simulated("w1", "prefill", "decode", max_context_tokens=64)) as running:
            answer = await anthropic_of(running).messages.create(messages=MESSAGES, max_tokens=10_000, **GREEDY)
    assert answer.stop_reason == "model_context_window_exceeded"


@pytest.mark.feature("guided decoding", engine="pytorch", facade="anthropic")
async def test_an_output_format_is_followed(tmp_path: Path) -> None:
    async with openai_bench(tools_worker(tmp_path, "prefill", "decode")) as running:
        schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}
        config: Any = {"format": {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}}
        answer = await anthropic_of(running).messages.create(
            messages=MESSAGES, max_tokens=100, output_config=config, **GREEDY
        )
        assert answer.content[0].type == "text"
        assert answer.content[0].text.replace(" ", "") == '{"a":"x"}'


@pytest.mark.feature("reasoning", engine="written", facade="anthropic")
async def test_reasoning_is_a_thinking_block_that_may_be_sent_back() -> None:
    with written_engines():
        async with openai_bench(writes("hm</think>\nYes.", REASONING_TEMPLATE)) as running:
            messages = anthropic_of(running).messages
            asked: Any = {"max_tokens": 2000, "model": "demo", "thinking": {"type": "enabled", "budget_tokens": 1024}}
            whole = await messages.create(messages=MESSAGES, **asked)
            thinking, text = whole.content
            assert (thinking.type, text.type) == ("thinking", "text")
            assert thinking.type == "thinking"
            assert (thinking.thinking, bool(thinking.signature)) == ("hm", True)
            async with messages.stream(messages=MESSAGES, **asked) as stream:
                final = await stream.get_final_message()
            streamed = final.content[0]
            assert streamed.type == "thinking"
            assert (streamed.thinking, streamed.signature) == ("hm", thinking.signature)
            turns: Any = [*MESSAGES, {"role": "assistant", "content": whole.content}, *MESSAGES]
            assert (await messages.create(messages=turns, **asked)).content[1].type == "text"


THINKING_TEMPLATE = HERMES_TEMPLATE + "{{ enable_thinking }} {{ reasoning_effort }}"


async def test_thinking_and_effort_are_variables_of_the_template() -> None:
    with written_engines():
        async with openai_bench(writes("x", THINKING_TEMPLATE)) as running:
            count = anthropic_of(running).messages.count_tokens
            counts = [
                (await count(messages=MESSAGES, model="demo", thinking=thinking, output_config=config)).input_tokens
                for thinking, config in (
                    ({"type": "disabled"}, {}),
                    ({"type": "adaptive"}, {}),
                    ({"type": "adaptive"}, {"effort": "low"}),
                    ({"type": "adaptive"}, {"effort": "max"}),
                )
            ]  # type: ignore[call-overload]
    # One token a character: False, True, True low, True high.
    assert [one - counts[1] for one in counts] == [1, 0, 3, 4]


@pytest.mark.feature("images", engine="pytorch", facade="anthropic")
async def test_the_demonstration_model_sees_a_picture(tmp_path: Path) -> None:
    encoded = base64.b64encode(PICTURE.read_bytes()).decode()
    authority = Authority(tmp_path, "pictures")
    async with web(authority.issue("web"), {"/a.png": ok(PICTURE.read_bytes())}) as site:
        hosts, networks = (f"127.0.0.1:{site.port}",), ("127.0.0.1/32",)
        fetch = FetchConfig(
            allowed_hosts=hosts, allowed_private_networks=networks, ca_file=str(authority.ca), timeout_seconds=60
        )
        router = OPENAI_ROUTER.model_copy(update={"media": MediaConfig(fetch=fetch)})
        workers = [demo_worker(role) for role in ("encode", "prefill", "decode")]
        async with openai_bench(*workers, router=router) as running:
            messages = anthropic_of(running).messages
            for source in (
                {"type": "base64", "media_type": "image/png", "data": encoded},
                {"type": "url", "url": f"https://127.0.0.1:{site.port}/a.png"},
            ):
                asked: Any = [{"type": "image", "source": source}, {"type": "text", "text": "What is in the picture?"}]
                turns: Any = [{"role": "user", "content": asked}]
                answer = await messages.create(messages=turns, max_tokens=50, **GREEDY)
                assert answer.content[0].type == "text"
                assert answer.content[0].text == SEEN
                counted = await messages.count_tokens(messages=turns, model="demo")
                assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
            elsewhere: Any = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
            with pytest.raises(anthropic.PermissionDeniedError, match=r"messages\[0\].content\[0\].source: the URI"):
                await messages.create(messages=[{"role": "user", "content": [elsewhere]}], max_tokens=5, **GREEDY)


async def test_the_system_prompt_may_be_blocks(served: Bench) -> None:
    count = anthropic_of(served).messages.count_tokens
    text = await count(messages=MESSAGES, model="demo", system="Be brief.")
    blocks = await count(
        messages=MESSAGES, model="demo", system=[{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    )
    bare = await count(messages=MESSAGES, model="demo")
    assert text.input_tokens == blocks.input_tokens > bare.input_tokens


async def test_turns_of_one_role_are_one_turn(served: Bench) -> None:
    count = anthropic_of(served).messages.count_tokens
    two: Any = [{"role": "user", "content": "hel"}, {"role": "user", "content": "lo"}]
    assert (await count(messages=two, model="demo")) == (await count(messages=MESSAGES, model="demo"))


async def test_the_models_are_listed_in_its_form_and_in_openais(served: Bench) -> None:
    client = anthropic_of(served)
    [model] = [one async for one in client.models.list()]
    assert (model.id, model.type, model.max_input_tokens) == ("demo", "model", 8192)
    assert (await client.models.retrieve("demo")).display_name == "demo"
    assert (await client_of(served).models.retrieve("demo")).owned_by == "baton"
    with pytest.raises(anthropic.NotFoundError):
        await client.models.retrieve("other")
    with pytest.raises(anthropic.BadRequestError, match="after_id: is no model"):
        await client.models.list(after_id="other")
    assert [one async for one in client.models.list(after_id="demo", limit=1)] == []


async def test_a_key_is_taken_in_either_header(tmp_path: Path) -> None:
    tokens, key = tmp_path / "tokens.json", "a" * 20
    tokens.write_text(json.dumps({"tokens": [{"name": "ann", "token": key, "role": "client"}]}))
    router = OPENAI_ROUTER.model_copy(update={"auth": AuthConfig(tokens_file=tokens)})
    body = {**BODY, "max_tokens": 2}
    async with openai_bench(simulated("w1", "prefill", "decode"), router=router) as running:
        statuses = [
            (await post_message(running, body, **headers)).status_code
            for headers in ({"x-api-key": key}, {"authorization": f"Bearer {key}"}, {"x-api-key": "other"}, {})
        ]
        answer = await post_message(running, body)
    assert statuses == [200, 200, 401, 401]
    assert answer.json()["error"]["type"] == "authentication_error"


async def test_a_used_up_quota_is_a_rate_limit_and_no_room_an_overload() -> None:
    quotas = QuotasConfig(default=QuotaConfig(requests_per_second=0.001, burst_seconds=1000))
    router = OPENAI_ROUTER.model_copy(update={"quotas": quotas})
    async with openai_bench(simulated("w1", "prefill", "decode"), router=router) as running:
        create = anthropic_of(running).messages.create
        await create(messages=MESSAGES, max_tokens=1, **GREEDY)
        with pytest.raises(anthropic.RateLimitError) as limited:
            await create(messages=MESSAGES, max_tokens=1, **GREEDY)
    assert limited.value.type == "rate_limit_error"
    assert int(limited.value.response.headers["retry-after"]) >= 1
    admission = AdmissionConfig(max_running_per_worker=1, max_waiting=0)
    router = OPENAI_ROUTER.model_copy(update={"admission": admission})
    async with openai_bench(simulated("w1", "prefill", "decode", decode_step_seconds=0.05), router=router) as running:
        messages = anthropic_of(running).messages
        async with messages.stream(messages=MESSAGES, max_tokens=1000, **GREEDY) as stream:
            await anext(stream.text_stream)
            with pytest.raises(anthropic.APIStatusError) as refused:
                await messages.create(messages=MESSAGES, max_tokens=1, **GREEDY)
    assert (refused.value.status_code, refused.value.type) == (529, "overloaded_error")


async def test_every_response_has_its_request_id(served: Bench) -> None:
    body = {**BODY, "max_tokens": 1}
    good = await post_message(served, body, **{"x-request-id": "mine"})
    bad = await post_message(served, {}, **{"x-request-id": "mine"})
    assert (good.headers["request-id"], good.json()["id"]) == ("mine", "msg_mine")
    assert (bad.headers["request-id"], bad.json()["request_id"]) == ("mine", "mine")


async def test_an_error_after_the_first_event_is_an_event() -> None:
    async with openai_bench(simulated("w1", "prefill", "decode", decode_step_seconds=0.01)) as running:
        stream = await anthropic_of(running).messages.create(messages=MESSAGES, max_tokens=5000, stream=True, **GREEDY)
        events = aiter(stream)
        while (await anext(events)).type != "content_block_delta":
            pass
        await running.stop("w1")
        with pytest.raises(anthropic.APIStatusError) as raised:
            [_ async for _ in events]
    assert raised.value.type in ("api_error", "overloaded_error")


async def test_a_client_that_leaves_stops_its_request() -> None:
    async with openai_bench(simulated("w1", "prefill", "decode", decode_step_seconds=0.01)) as running:
        async with anthropic_of(running).messages.stream(messages=MESSAGES, max_tokens=5000, **GREEDY) as stream:
            await anext(stream.text_stream)
            assert running.used_blocks() > 0
        await eventually(lambda: running.used_blocks() == 0)


async def test_a_call_is_one_line_in_the_log(served: Bench) -> None:
    with capture_logs(processors=[merge_log_fields]) as lines:
        await post_message(served, {**BODY, "max_tokens": 1, "model": "other"})
    [line] = [line for line in lines if line.get("method") == "/anthropic/v1/messages"]
    assert (line["code"], line["reason"]) == ("NOT_FOUND", "MODEL_NOT_FOUND")


async def test_calls_run_beside_each_other(served: Bench) -> None:
    create = anthropic_of(served).messages.create
    answers = await asyncio.gather(*(create(messages=MESSAGES, max_tokens=5, **GREEDY) for _ in range(8)))
    assert len({answer.id for answer in answers}) == 8
