"""Errors that the official `openai` package raises: wrong fields, quotas, and failures within streams."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from support.clients.openai_api import ALONE, OPENAI_ROUTER, client_of, openai_bench, url_of
from support.cluster.in_process import Bench, simulated

from discovery.memory import MemoryRegistry
from router.config import OpenAIConfig, QuotaConfig, QuotasConfig
from router.server import host_router
from rpc.auth.access import AuthConfig

MESSAGES: Any = [{"role": "user", "content": "hello"}]
KEYS = [("ann", "client"), ("bob", "client"), ("cook", "worker")]
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather", "parameters": {"type": "object", "properties": {}}},
}

CALL: Any = {"id": "a", "type": "function", "function": {"name": "a b", "arguments": "{}"}}
CALLING: Any = {"role": "assistant", "tool_calls": [CALL]}


def key_client(address: str, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key=key, max_retries=0, default_headers=ALONE)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("temperature", {"temperature": -1.0}, "temperature"),
    ("max_tokens", {"max_tokens": 0}, "max_tokens"),
    ("max_completion_tokens", {"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens"),
    ("n", {"n": 99}, "n"),
    ("a number for a truth value", {"extra_body": {"store": 0}}, "store"),
    ("store", {"store": True}, "store"),
    ("the name of a tool", {"tools": [{**TOOL, "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ("a tool that is given twice", {"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ("a call's name", {"messages": [CALLING]}, "messages[0].tool_calls[0].function.name"),
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
        ({"role": "user", "content": []}, "input[0].content"),
        ({"type": "function_call_output", "call_id": "c", "output": []}, "input[0].output"),
        ({"type": "function_call", "call_id": "c", "name": "a b", "arguments": "{}"}, "input[0].name"),
        ({"type": "function_call", "call_id": "c", "name": "a", "arguments": "["}, "input[0].arguments"),
    ],
)
async def test_a_wrong_item_of_a_response_is_named(served: Bench, item: dict[str, Any], param: str) -> None:
    wrong: Any = [item]
    with pytest.raises(openai.BadRequestError) as refused:
        await client_of(served).responses.create(model="demo", input=wrong)
    assert param in [part.partition(": ")[0] for part in str(refused.value.body["message"]).split("; ")]  # type: ignore[index]


async def test_wrong_items_after_others_are_named(served: Bench) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "a", "arguments": "{}"}
    items: Any = [
        {"role": "assistant", "content": "x"},
        call,
        {**call, "name": "a b"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {**call, "arguments": "["},
        {"role": "user", "content": []},
    ]
    with pytest.raises(openai.BadRequestError) as refused:
        await client_of(served).responses.create(
            model="demo", input=items, instructions="Be brief.", max_output_tokens=0
        )
    named = [part.partition(": ")[0] for part in str(refused.value.body["message"]).split("; ")]  # type: ignore[index]
    assert named == ["input[2].name", "input[4].arguments", "input[5].content", "max_output_tokens"]


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


async def test_a_body_over_the_limit_is_refused() -> None:
    openai_config = OpenAIConfig(listen="127.0.0.1:0", max_body_bytes=2048)
    router = OPENAI_ROUTER.model_copy(update={"openai": openai_config})
    async with openai_bench(simulated("w1", "prefill", "decode"), router=router) as running:
        with pytest.raises(openai.APIStatusError) as refused:
            await client_of(running).completions.create(model="demo", prompt="x" * 4096, max_tokens=1)
        assert refused.value.status_code == 413
