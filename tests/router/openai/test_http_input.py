"""The memory, time and connections that a client may use before its request to OpenAI's API is read."""

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping
from contextlib import suppress
from typing import Any

import pytest
from support.clients.openai_api import OPENAI_ROUTER, openai_bench
from support.cluster.in_process import DECODE, PREFILL, Bench
from support.lifetimes import in_one_task

from baton.errors import Draining
from baton_http2.input_budget import InputLimits
from router.config import ClientConnections, OpenAIConfig
from router.openai.call import HttpCall
from router.openai.exchange import run_stream
from router.openai.images import ImageStream

MIB = 2**20
LIMITS = InputLimits(
    process_bytes=8 * MIB, peer_bytes=8 * MIB, wait_seconds=0.3, stall_seconds=0.5, bytes_per_second=1000
)
BODY = json.dumps({"model": "demo", "prompt": "hi", "max_tokens": 3}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.fixture
async def bounded() -> AsyncIterator[Bench]:
    """A router with little memory and time for requests, and few connections."""
    config = OPENAI_ROUTER.model_copy(
        update={
            "connections": ClientConnections(input=LIMITS),
            "openai": OpenAIConfig(listen="127.0.0.1:0", max_connections=20),
        }
    )
    async with in_one_task(openai_bench(PREFILL, DECODE, router=config)) as running:
        yield running


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def drip(self, data: bytes) -> bytes:
        """Sends byte by byte until something comes, or the connection is closed: what came."""
        answer = asyncio.create_task(self.reader.read(4096))
        with suppress(ConnectionResetError):  # closed while a byte was on its way
            for at in range(len(data)):
                await self.send(data[at : at + 1])
                if (await asyncio.wait([answer], timeout=0.02))[0]:
                    break
        try:
            return await asyncio.wait_for(answer, 20)
        except ConnectionResetError:
            return b""


async def client_of(bench: Bench) -> Client:
    host, _, port = bench.openai_address.rpartition(":")
    return Client(*await asyncio.open_connection(host, int(port)))


def head(size: int) -> bytes:
    return HEAD + b"content-length: %d\r\n\r\n" % size


async def test_a_body_that_comes_byte_by_byte_is_refused_with_408(bounded: Bench) -> None:
    client = await client_of(bounded)
    await client.send(head(5000))
    assert (await client.drip(b" " * 5000)).startswith(b"HTTP/1.1 408 ")


async def test_a_body_that_does_not_come_is_refused_with_408(bounded: Bench) -> None:
    client = await client_of(bounded)
    await client.send(head(5000))
    assert (await asyncio.wait_for(client.reader.read(4096), 20)).startswith(b"HTTP/1.1 408 ")


async def test_a_slow_body_that_keeps_the_rate_is_answered(bounded: Bench) -> None:
    client = await client_of(bounded)
    body = BODY + b" " * 3000
    await client.send(head(len(body)))
    for at in range(0, len(body), 200):
        await client.send(body[at : at + 200])
        await asyncio.sleep(0.05)
    assert (await asyncio.wait_for(client.reader.read(4096), 20)).startswith(b"HTTP/1.1 200 ")


async def test_a_head_that_comes_byte_by_byte_ends_the_connection(bounded: Bench) -> None:
    client = await client_of(bounded)
    assert await client.drip(HEAD + b"x" * 5000) == b""


async def test_a_connection_is_used_again_after_pauses(bounded: Bench) -> None:
    client = await client_of(bounded)
    for _ in range(2):
        await client.send(head(len(BODY)) + BODY)
        assert (await asyncio.wait_for(client.reader.read(4096), 20)).startswith(b"HTTP/1.1 200 ")
        await asyncio.sleep(1.2)


async def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(bounded: Bench) -> None:
    client = await client_of(bounded)
    await client.send(head(17 * MIB))
    assert (await asyncio.wait_for(client.reader.read(4096), 20)).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_bodies_that_are_not_read_use_no_more_than_the_budget(bounded: Bench, is_chunked: bool) -> None:
    clients = [await client_of(bounded) for _ in range(4)]
    size = 4 * MIB
    for each in clients:
        each.writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % size if is_chunked else head(size))
        each.writer.write(b" " * (3 * MIB))
    answers = [asyncio.create_task(each.reader.read(4096)) for each in clients]
    done, _ = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED, timeout=20)
    first = done.pop().result()
    assert first.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in first
    assert b"the memory for unread requests is used up" in first
    for each in clients:
        each.writer.transport.abort()
    await asyncio.wait(answers)


async def test_idle_connections_leave_room_for_new_ones(bounded: Bench) -> None:
    idle = [await client_of(bounded) for _ in range(60)]
    client = await client_of(bounded)
    await client.send(head(len(BODY)) + BODY)
    assert (await asyncio.wait_for(client.reader.read(4096), 20)).startswith(b"HTTP/1.1 200 ")
    assert await asyncio.wait_for(idle[0].reader.read(), 20) == b""
    for each in idle:
        each.writer.close()


async def test_a_few_requests_at_once_are_answered_in_turn(bounded: Bench) -> None:
    client = await client_of(bounded)
    await client.send(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" * 9 + (head(len(BODY)) + BODY))
    answers = b""
    while answers.count(b"HTTP/1.1 200 ") < 10 or not answers.endswith(b"}"):
        answers += await asyncio.wait_for(client.reader.read(65_536), 20)
    assert b"text_completion" in answers.rpartition(b"HTTP/1.1")[2]


TOO_MANY = {
    "requests": b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" * 3000,
    "chunks": HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 50_000,
}


@pytest.mark.parametrize("name", TOO_MANY)
async def test_what_comes_in_too_many_pieces_ends_the_connection(bounded: Bench, name: str) -> None:
    client = await client_of(bounded)
    with suppress(ConnectionError):
        await client.send(TOO_MANY[name])
    answers = b""
    with suppress(ConnectionError):
        answers = await asyncio.wait_for(client.reader.read(), 20)
    assert answers.count(b"HTTP/1.1 200 ") < 100
    assert len(await bounded.text_of(prompt="hi", stopping={"max_tokens": 3})) > 0


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [(b"1.1", 1, b"200"), (b"1.1", 0, b"400"), (b"1.1", 2, b"400"), (b"1.0", 0, b"200"), (b"1.0", 2, b"400")],
)
async def test_a_request_names_its_host_once(bounded: Bench, version: bytes, hosts: int, status: bytes) -> None:
    client = await client_of(bounded)
    await client.send(b"GET /v1/models HTTP/%b\r\n" % version + b"Host: x\r\n" * hosts + b"\r\n")
    assert (await asyncio.wait_for(client.reader.readline(), 20)).split()[1] == status


@pytest.mark.parametrize(
    ("version", "host", "status"),
    [
        (b"1.1", b"", b"200"),
        (b"1.1", b"[::1]:80", b"200"),
        (b"1.1", b"a-b.example:443", b"200"),
        (b"1.1", b"a b", b"400"),
        (b"1.1", b"good@evil", b"400"),
        (b"1.1", b"good/evil", b"400"),
        (b"1.1", b"good#evil", b"400"),
        (b"1.0", b"a?b", b"400"),
        (b"1.1", b"a\\b", b"400"),
        (b"1.1", b"a\xffb", b"400"),
    ],
)
async def test_a_host_is_one_that_a_url_can_have(bounded: Bench, version: bytes, host: bytes, status: bytes) -> None:
    client = await client_of(bounded)
    await client.send(b"GET /v1/models HTTP/%b\r\nHost: %b\r\n\r\n" % (version, host))
    assert (await asyncio.wait_for(client.reader.readline(), 20)).split()[1] == status


async def test_a_number_of_too_many_digits_is_refused_without_advice_for_programmers(bounded: Bench) -> None:
    client = await client_of(bounded)
    body = b'{"prompt":"a","seed":' + b"9" * 5000 + b"}"
    await client.send(head(len(body)) + body)
    answer = await asyncio.wait_for(client.reader.readuntil(b"}}"), 20)
    assert b" 400 " in answer.partition(b"\r\n")[0]
    assert b"4300 digits" in answer
    assert b"sys." not in answer


async def test_a_body_in_some_chunks_is_answered(bounded: Bench) -> None:
    client = await client_of(bounded)
    pieces = [BODY[at : at + 7] for at in range(0, len(BODY), 7)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    await client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
    assert (await asyncio.wait_for(client.reader.read(65_536), 20)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("error", [Draining("late"), asyncio.CancelledError()])
async def test_what_fails_after_the_end_of_a_stream_writes_nothing_more(error: BaseException) -> None:
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> MutableMapping[str, Any]:
        await asyncio.Event().wait()
        return {}

    call = HttpCall({"headers": []}, receive, send)
    stream = ImageStream(call, 0)

    async def work() -> None:
        await call.begin(200, ())
        await call.end(b"all")
        raise error

    with suppress(asyncio.CancelledError):
        await run_stream(call, stream, work())
    assert [message.get("body") for message in sent] == [None, b"all"]
