"""The HTTP part: paths and methods, bodies, and refusals."""

import asyncio
import json
import time
from email.utils import parsedate_to_datetime

import httpx2
import pytest
from openai import APIError, APIStatusError, AsyncOpenAI, AsyncStream
from openai.types import Completion
from structlog.testing import capture_logs
from support.clients.openai_api import ALONE, OPENAI_ROUTER, post, url_of
from support.cluster.in_process import Bench, simulated
from support.eventually import eventually

from baton.errors import ConfigError, InvalidRequest
from discovery.memory import MemoryRegistry
from router.config import OpenAIConfig, RouterConfig
from router.openai.json_body import MAX_VALUES, parse
from router.server import host_router
from runtime.aio import leaf_errors
from services.server import host_worker

MANY = json.dumps({"a": [0] * MAX_VALUES}).encode()


async def test_unknown_paths_and_methods_are_refused_in_openais_shape(served: Bench) -> None:
    assert (await post(served, "/audio/speech", {})).status_code == 404
    async with httpx2.AsyncClient(trust_env=False) as http:
        answer = await http.get(f"{url_of(served)}/completions")
        others = [
            await http.request(method, f"{url_of(served)}{path}")
            for method, path in (("HEAD", "/completions"), ("OPTIONS", "/completions"), ("POST", "/models/demo"))
        ]
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["message"] == "/v1/completions expects POST"
    assert [(one.status_code, one.headers["allow"]) for one in others] == [
        (405, "POST"),
        (405, "POST"),
        (405, "GET, HEAD"),
    ]


async def test_head_is_get_without_its_body(served: Bench) -> None:
    async with httpx2.AsyncClient(trust_env=False) as http:
        for path, status in (("/models", 200), ("/models/demo", 200), ("/models/none", 404)):
            whole, head = await http.get(f"{url_of(served)}{path}"), await http.head(f"{url_of(served)}{path}")
            assert (whole.status_code, head.status_code, head.content) == (status, status, b"")
            assert head.headers["content-length"] == str(len(whole.content))


async def test_every_answer_has_the_date_at_which_it_was_made(served: Bench) -> None:
    async with httpx2.AsyncClient(trust_env=False) as http:
        for _ in range(2):
            before = int(time.time())
            answer = await http.get(f"{url_of(served)}/models")
            assert before <= parsedate_to_datetime(answer.headers["date"]).timestamp() <= time.time()
            await asyncio.sleep(1.1)


BODIES = [
    ("empty", b""),
    ("no json", b"{"),
    ("list", b"[]"),
    ("nan", b'{"model": NaN}'),
    ("utf-8", b'{"model": "\xff"}'),
    ("surrogate", b'{"model": "\\ud800"}'),
    ("deep", b"[" * 60_000),
    ("digits", b'{"seed": ' + b"9" * 5000 + b"}"),
    ("values", MANY),
]


@pytest.mark.parametrize(("name", "body"), BODIES, ids=[name for name, _ in BODIES])
async def test_a_body_that_is_no_request_is_refused(served: Bench, name: str, body: bytes) -> None:
    answer = await post(served, "/completions", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "body")


@pytest.mark.parametrize("encoding", ["gzip", "Deflate", "identity, br", "unknown"])
async def test_an_encoded_body_is_refused(served: Bench, encoding: str) -> None:
    body, headers = {"model": "demo", "prompt": "hi", "max_tokens": 1}, {"content-encoding": encoding}
    async with httpx2.AsyncClient(trust_env=False) as http:
        for path in ("completions", "chat/completions", "responses", "embeddings", "images/generations"):
            answer = await http.post(f"{url_of(served)}/{path}", json=body, headers=headers)
            assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "identity")
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http_request")
            assert encoding in error["message"]


@pytest.mark.parametrize("encoding", ["identity", "Identity, identity", ""])
async def test_a_body_that_is_sent_as_it_is_may_say_so(served: Bench, encoding: str) -> None:
    body, headers = {"model": "demo", "prompt": "hi", "max_tokens": 1}, {"content-encoding": encoding}
    async with httpx2.AsyncClient(trust_env=False) as http:
        answer = await http.post(f"{url_of(served)}/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text


def test_what_is_within_strings_is_no_value() -> None:
    text = ',:[{"\\' * MAX_VALUES
    assert parse(json.dumps({"prompt": text}).encode())["prompt"] == text
    with pytest.raises(InvalidRequest, match="values"):
        parse(json.dumps({"prompt": text, "more": [0] * MAX_VALUES}).encode())


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
ENDLESS = [
    ("header", HEAD + b"x: ", b"a" * 4096),
    ("headers", HEAD, b"x: a\r\n" * 512),
    ("path", b"GET /", b"a" * 4096),
    ("trailers", HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", b"x: a\r\n" * 512),
]


@pytest.mark.parametrize(("begin", "more"), [one[1:] for one in ENDLESS], ids=[one[0] for one in ENDLESS])
async def test_endless_headers_are_refused(served: Bench, begin: bytes, more: bytes) -> None:
    host, _, port = served.openai_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(begin)
    answer = asyncio.create_task(reader.read())
    try:
        for _ in range(1024):
            if answer.done():
                break
            writer.write(more)
            await writer.drain()
            await asyncio.sleep(0)
        assert (await asyncio.wait_for(answer, 60)).startswith(b"HTTP/1.1 400 ")
    except ConnectionError:
        pass  # the answer was overtaken by the reset of a connection that was still being written to
    finally:
        answer.cancel()
        writer.close()


async def test_a_port_that_is_taken_is_a_wrong_configuration(served: Bench) -> None:
    for listen in (served.openai_address, "nowhere", "127.0.0.1:99999"):
        config = OPENAI_ROUTER.model_copy(update={"openai": OpenAIConfig(listen=listen)})
        assert (await _wrong_configuration(config)).startswith("openai.listen: ")


async def _wrong_configuration(config: RouterConfig) -> str:
    try:
        async with host_router(config, MemoryRegistry("test")):
            return ""
    except Exception as error:
        return "".join(one.message for one in leaf_errors(error) if isinstance(one, ConfigError))


async def test_a_router_that_stops_lets_streams_end() -> None:
    registry = MemoryRegistry("test")
    slow = simulated("w1", "prefill", "decode", decode_step_seconds=0.02)
    config = OPENAI_ROUTER.model_copy(update={"drain_seconds": 20.0})
    async with host_worker(slow, registry):
        async with host_router(config, registry) as router:
            await eventually(lambda: sum(not worker.problem for worker in router.cluster.workers) == 1)
            client = AsyncOpenAI(base_url=f"http://{router.openai_address}/v1", api_key="any", default_headers=ALONE)
            stream = await client.completions.create(model="demo", prompt="x", max_tokens=50, stream=True)
            first = await anext(aiter(stream))
            reading = asyncio.create_task(_text(stream))
        assert len(first.choices[0].text + await reading) == 50


async def test_clients_whose_answers_a_drain_ends_learn_that() -> None:
    registry = MemoryRegistry("test")
    slow = simulated("w1", "prefill", "decode", decode_step_seconds=0.05)
    config = OPENAI_ROUTER.model_copy(update={"drain_seconds": 0.5})
    async with host_worker(slow, registry), host_router(config, registry) as router:
        await eventually(lambda: sum(not worker.problem for worker in router.cluster.workers) == 1)
        url = f"http://{router.openai_address}/v1"
        client = AsyncOpenAI(base_url=url, api_key="any", default_headers=ALONE, max_retries=0)
        whole = asyncio.ensure_future(client.completions.create(model="demo", prompt="x", max_tokens=2000))
        stream = await client.completions.create(model="demo", prompt="x", max_tokens=2000, stream=True)
        await anext(aiter(stream))
        reading = asyncio.create_task(_text(stream))
        await eventually(lambda: len(router.requests) == 2)
    with pytest.raises(APIStatusError) as refused:
        await asyncio.wait_for(whole, 60)
    assert (refused.value.status_code, refused.value.code) == (503, "draining")
    with pytest.raises(APIError, match="the router ended before the request did"):
        await asyncio.wait_for(reading, 60)


async def _text(stream: AsyncStream[Completion]) -> str:
    return "".join([chunk.choices[0].text async for chunk in stream])


async def test_an_unknown_path_is_no_failure_of_the_router(served: Bench) -> None:
    with capture_logs() as logs:
        async with httpx2.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{url_of(served)}/nowhere")).status_code == 404
    [ended] = [line for line in logs if line["event"] == "call ended" and line["code"] != "OK"]
    assert ended["code"] == "UNIMPLEMENTED"
