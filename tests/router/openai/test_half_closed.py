"""Clients that close their side of the connection after a whole request: they are answered, unless they have gone."""

import asyncio
import json

import pytest
from support.clients.openai_api import openai_bench
from support.cluster.in_process import Bench, simulated
from support.eventually import eventually

REQUEST = {"model": "demo", "prompt": "x", "max_tokens": 10, "ignore_eos": True}
SLOW = simulated("w1", "prefill", "decode", decode_step_seconds=0.02)


async def asked(
    running: Bench, body: object, *, version: str = "1.1", times: int = 1
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection with a request that is sent as a whole."""
    host, _, port = running.openai_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write((head.encode() + content) * times)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_only_sends_no_more_is_answered(stream: bool) -> None:
    async with openai_bench(SLOW) as running:
        reader, writer = await asked(running, {**REQUEST, "stream": stream})
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
    assert answer.count(b'"finish_reason": "length"') == 1
    assert (b"data: [DONE]" in answer) == stream


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_has_closed_the_connection_frees_its_blocks_at_once(stream: bool, version: str) -> None:
    async with openai_bench(SLOW) as running:
        _, writer = await asked(running, {**REQUEST, "max_tokens": 2000, "stream": stream}, version=version)
        await eventually(lambda: running.used_blocks() > 0)
        writer.close()
        await eventually(lambda: running.used_blocks() == 0, 20)  # of 40 s that the answer would take


async def test_a_half_closed_connection_on_which_nothing_is_asked_is_closed() -> None:
    async with openai_bench(SLOW) as running:
        host, _, port = running.openai_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_that_come_together_are_all_answered_in_their_order(stream: bool) -> None:
    async with openai_bench(SLOW) as running:
        reader, writer = await asked(running, {**REQUEST, "stream": stream}, times=3)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == answer.count(b'"finish_reason": "length"') == 3


async def test_an_incomplete_request_behind_others_ends_the_connection_after_their_answers() -> None:
    async with openai_bench(SLOW) as running:
        reader, writer = await asked(running, REQUEST, times=2)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == answer.count(b'"finish_reason": "length"') == 2


async def test_a_client_that_leaves_behind_several_requests_frees_the_blocks_of_the_first() -> None:
    async with openai_bench(SLOW) as running:
        _, writer = await asked(running, {**REQUEST, "max_tokens": 2000, "stream": True}, times=3)
        await eventually(lambda: running.used_blocks() > 0)
        writer.transport.abort()
        await eventually(lambda: running.used_blocks() == 0, 20)  # of 40 s that the answer would take
