"""Calls that come together begin in several turns of the loop, so that what runs has its turn between them."""

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

from hyperframe.frame import RstStreamFrame
from support.eventually import eventually
from support.http2.peer import Peer, head, message, peer_of
from support.http2.server import Seen, echoing
from support.loop_turns import each_turn
from support.servers.scripted_router import scripted
from support.servers.shared_stream import Shared, Sharing, get_model

from baton.calls import unary
from baton.engine.v1 import multiplex_pb2 as pb
from baton.engine.v1 import multiplex_pb2_grpc
from baton.errors import BatonError
from baton.inference.v1 import inference_service_pb2_grpc, model_pb2
from baton_http2.client.dialing import ServerAddress, open_call
from baton_http2.turns import CALLS_A_TURN, CallTurns
from rpc.health import Health
from rpc.server import Service, serve

CALLS = 3 * CALLS_A_TURN + 1
# More than it takes to read what has come.
TURNS = 2_000
CANCEL = 8
MULTIPLEX = "baton.engine.v1.MultiplexService"


class Hanging:
    """Calls that wait until they are cancelled, and their numbers."""

    def __init__(self) -> None:
        self.begun = self.ended = 0

    async def get_model(self, _request: object, _context: object) -> None:
        self.begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.ended += 1


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


async def hanging(peer: Peer, seen: Seen, **headers: str) -> None:
    for number in range(CALLS):
        await peer.call(2 * number + 1, "hang", b"x", **headers)
    await eventually(lambda: seen.started == CALLS)


async def test_calls_of_a_connection_that_is_lost_end_in_several_turns() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await hanging(peer, server.seen)
        async with each_turn(lambda: server.seen.cancelled) as grown:
            peer.close()
            await eventually(lambda: server.seen.cancelled == CALLS)
    assert max(grown) <= 2 * CALLS_A_TURN


async def test_calls_that_are_reset_together_end_in_several_turns() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await hanging(peer, server.seen)
        async with each_turn(lambda: server.seen.cancelled) as grown:
            await peer.send(*(RstStreamFrame(2 * number + 1, error_code=CANCEL) for number in range(CALLS)))
            await eventually(lambda: server.seen.cancelled == CALLS)
    assert max(grown) <= 2 * CALLS_A_TURN


async def test_calls_with_one_deadline_end_in_several_turns() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await hanging(peer, server.seen, grpc_timeout="3S")
        # They come one after another, and are due together.
        loop = asyncio.get_running_loop()
        held_until = loop.time() + 3.5
        async with each_turn(lambda: server.seen.cancelled) as grown:
            while loop.time() < held_until:
                time.sleep(0.1)  # noqa: ASYNC251  # the loop does nothing else meanwhile
            await eventually(lambda: server.seen.cancelled == CALLS)
        assert {(await peer.ended(2 * number + 1)).status for number in range(CALLS)} == {4}
    assert max(grown) <= 2 * CALLS_A_TURN


async def test_calls_of_a_shared_stream_that_is_lost_end_in_several_turns_on_both_sides() -> None:
    hanging_calls, failed = Hanging(), list[BatonError]()

    async def ask(calls: Shared) -> None:
        try:
            await unary(calls.stub.GetModel(model_pb2.GetModelRequest()))
        except BatonError as error:
            failed.append(error)

    async with AsyncExitStack() as stack:
        peer = await stack.enter_async_context(
            scripted(is_multiplexed=True, drain_seconds=0, GetModel=hanging_calls.get_model)
        )
        async with Sharing("http2").beside(peer) as channel:
            stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
            asked = [asyncio.create_task(ask(Shared(peer, stub))) for _ in range(CALLS)]
            await eventually(lambda: hanging_calls.begun == CALLS)
            async with (
                each_turn(lambda: hanging_calls.ended) as ended_each,
                each_turn(lambda: len(failed)) as failed_each,
            ):
                await stack.aclose()
                await asyncio.gather(*asked)
    assert hanging_calls.ended == len(failed) == CALLS
    assert max(ended_each) <= 2 * CALLS_A_TURN
    assert max(failed_each) <= 2 * CALLS_A_TURN


async def test_calls_that_are_cancelled_together_on_a_shared_stream_end_in_several_turns() -> None:
    hanging_calls = Hanging()
    async with Sharing("http2").calls(GetModel=hanging_calls.get_model) as calls:
        asked = [asyncio.create_task(unary(calls.stub.GetModel(model_pb2.GetModelRequest()))) for _ in range(CALLS)]
        await eventually(lambda: hanging_calls.begun == CALLS)
        async with each_turn(lambda: hanging_calls.ended) as grown:
            for each in asked:
                each.cancel()
            await eventually(lambda: hanging_calls.ended == CALLS)
    assert max(grown) <= 2 * CALLS_A_TURN


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
