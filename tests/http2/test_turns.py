"""Calls that come together begin in several turns of the loop, so that what runs has its turn between them."""

import asyncio
from typing import Any

from hyperframe.frame import RstStreamFrame
from support.eventually import eventually
from support.http2.peer import head, message, peer_of
from support.http2.server import echoing
from support.loop_turns import each_turn
from support.servers.shared_stream import Shared, Sharing, get_model

from baton.calls import unary
from baton.engine.v1 import multiplex_pb2 as pb
from baton.engine.v1 import multiplex_pb2_grpc
from baton.inference.v1 import model_pb2
from baton_http2.client.dialing import ServerAddress, open_call
from baton_http2.turns import CALLS_A_TURN, CallTurns
from rpc.health import Health
from rpc.server import Service, serve

CALLS = 3 * CALLS_A_TURN + 1
# More than it takes to read what has come.
TURNS = 2_000
CANCEL = 8
MULTIPLEX = "baton.engine.v1.MultiplexService"


async def test_a_call_alone_begins_at_once() -> None:
    begun: list[int] = []
    CallTurns().run(lambda: begun.append(1))
    assert begun == [1]


async def test_many_calls_begin_in_their_order_and_none_of_a_later_turn_passes_them() -> None:
    turns, begun = CallTurns(), list[int]()
    for number in range(CALLS):
        turns.run(lambda number=number: begun.append(number))
    assert begun == list(range(CALLS_A_TURN))
    await asyncio.sleep(0)
    turns.run(lambda: begun.append(CALLS))
    await eventually(lambda: len(begun) > CALLS)
    assert begun == list(range(CALLS + 1))


async def test_calls_of_one_read_begin_in_several_turns() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        frames = bytearray()
        for number in range(CALLS):
            stream_id = (2 * number + 1).to_bytes(4, "big")
            block, body = peer.block(head("hang")), message(b"x")
            frames += len(block).to_bytes(3, "big") + b"\1\4" + stream_id + block
            frames += len(body).to_bytes(3, "big") + b"\0\1" + stream_id + body
        async with each_turn(lambda: server.seen.started) as grown:
            await peer.send(bytes(frames))
            await eventually(lambda: server.seen.started == CALLS)
    assert max(grown) <= 2 * CALLS_A_TURN


async def test_a_call_that_is_reset_while_it_waits_for_its_turn_never_begins() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        before = 0

        def begin_another() -> None:
            nonlocal before
            before += 1

        for _ in range(TURNS * CALLS_A_TURN):
            server.server.calls.turns.run(begin_another)
        await peer.call(1, "hang", b"x")
        await peer.send(RstStreamFrame(1, error_code=CANCEL))
        await peer.ping()
        assert before < TURNS * CALLS_A_TURN
        await eventually(lambda: before == TURNS * CALLS_A_TURN)
        await peer.ping()
        assert server.seen.started == 0


async def test_calls_of_one_message_of_a_shared_stream_begin_and_end_in_several_turns() -> None:
    begun, ended = 0, 0

    async def note(request: model_pb2.GetModelRequest, context: Any) -> model_pb2.GetModelResponse:
        nonlocal begun
        begun += 1
        await answering.wait()
        return await get_model(request, context)

    async def ask(calls: Shared, name: str) -> str:
        nonlocal ended
        answer = await unary(calls.stub.GetModel(model_pb2.GetModelRequest(name=name)))
        ended += 1
        return answer.model.name

    answering, names = asyncio.Event(), [str(number) for number in range(CALLS)]
    async with Sharing("http2").calls(GetModel=note) as calls:
        asked = asyncio.gather(*(ask(calls, name) for name in names))
        async with each_turn(lambda: begun) as begun_each, each_turn(lambda: ended) as ended_each:
            await eventually(lambda: begun == CALLS)
            answering.set()
            assert await asked == names
    # Those of two turns, where a look comes between the steps of one.
    assert max(begun_each) <= 2 * CALLS_A_TURN
    assert max(ended_each) <= 2 * CALLS_A_TURN


async def test_tokens_that_have_piled_up_are_taken_in_several_turns() -> None:
    tokens, messages, taken = 256, 500, list[bytes]()

    async def send(_requests: object, context: Any) -> None:
        step = pb.MultiplexResponse(token_calls=range(tokens), token_ids=range(tokens))
        for _ in range(messages):
            await context.write(step)

    servicer = multiplex_pb2_grpc.MultiplexServiceServicer()
    servicer.Multiplex = send  # type: ignore[method-assign, assignment]
    service = Service(MULTIPLEX, multiplex_pb2_grpc.add_MultiplexServiceServicer_to_server, servicer)
    async with (
        serve("127.0.0.1:0", [service], health=Health(), drain_seconds=0) as server,
        each_turn(lambda: len(taken)) as grown,
        open_call(ServerAddress(server.address), f"/{MULTIPLEX}/Multiplex", taken.append),
    ):
        await eventually(lambda: len(taken) == messages)
    assert max(grown) * tokens <= 1024
