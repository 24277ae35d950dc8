"""Calls by HTTP that come or end together do so in several turns of the loop."""

import asyncio
import json
from typing import Any

import uvloop
from support.clients.openai_api import openai_bench
from support.cluster.in_process import simulated
from support.eventually import eventually
from support.loop_turns import each_turn

from baton_http2.turns import CALLS_A_TURN
from router.config import OpenAIConfig
from router.openai.server import serve_openai
from rpc.interceptors.calls import RunningCalls
from rpc.server import ConnectionLimits, SharedLimits

CLIENTS = 6 * CALLS_A_TURN
BODY = json.dumps({"model": "demo", "prompt": "hello", "max_tokens": 5000, "stream": True}).encode()
REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)


class Waits:
    """An application whose calls wait until their clients leave."""

    def __init__(self) -> None:
        self.running = RunningCalls()
        self.begun = self.ended = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        self.begun += 1
        assert (await receive())["type"] == "http.disconnect"
        self.ended += 1


class Writes(Waits):
    """One whose calls write until their clients have left."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        waiting = asyncio.create_task(super().__call__(scope, receive, send))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while not waiting.done():
                await send({"type": "http.response.body", "body": b"x" * 100, "more_body": True})
                await asyncio.sleep(0)
        except RuntimeError:
            self.failures += 1
        await waiting


async def ended_each_turn(app: Any) -> list[int]:
    """The numbers of calls that end in each turn, once all clients have left at once."""
    shared = SharedLimits.of(ConnectionLimits())
    async with serve_openai(OpenAIConfig(listen="127.0.0.1:0"), app, shared, drain_seconds=0) as server:
        clients = await clients_at(server.address)
        for each in clients:
            each.write(REQUEST)
        await eventually(lambda: app.begun == CLIENTS)
        async with each_turn(lambda: app.ended) as ended:
            for each in clients:
                each.transport.abort()
            await eventually(lambda: app.ended == CLIENTS)
    return ended


async def clients_at(address: str) -> list[asyncio.StreamWriter]:
    """Connections that have no call yet."""
    host, _, port = address.rpartition(":")
    return [(await asyncio.open_connection(host, int(port)))[1] for _ in range(CLIENTS)]


async def test_calls_that_come_together_begin_in_several_turns() -> None:
    worker = simulated("w1", "prefill", "decode", decode_step_seconds=0.05, num_blocks=8192)
    async with openai_bench(worker) as running:
        clients = await clients_at(running.openai_address)
        async with each_turn(lambda: len(running.requests)) as begun:
            for each in clients:
                each.write(REQUEST)
            await eventually(lambda: len(running.requests) == CLIENTS)
        for each in clients:
            each.transport.abort()
    assert max(begun) <= 2 * CALLS_A_TURN


async def test_calls_whose_clients_leave_together_end_in_several_turns() -> None:
    assert max(await ended_each_turn(Waits())) <= 2 * CALLS_A_TURN


def test_no_write_fails_to_a_client_that_has_left_together_with_others() -> None:
    async def leave() -> int:
        app = Writes()
        await ended_each_turn(app)
        return app.failures

    # asyncio's own event loop does not raise.
    assert uvloop.run(leave()) == 0
