"""A servicer's view of its call, and the ends of calls: by their caller, by their deadline, with their connection."""

import asyncio
import contextvars
from typing import Any

import grpc
import pytest
from grpc import StatusCode, aio
from hyperframe.frame import RstStreamFrame
from support.eventually import eventually
from support.http2.peer import head, message, opened, peer_of
from support.http2.server import SERVICE, Seen, echoing, handlers, path

from baton_http2.limits import Http2Limits, ServerLimits
from baton_http2.server.server import Http2Server
from runtime.aio import timeout

CANCEL = 8


async def test_a_reset_cancels_the_servicer_and_tells_who_asked_to_be_told() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await peer.call(1, "hang", b"x")
        await peer.until(lambda: peer.answer(1).messages == [b"x"])
        await peer.send(RstStreamFrame(1, error_code=CANCEL))
        await eventually(lambda: server.seen.cancelled == 1)
        (context,) = server.seen.contexts
        assert server.seen.ended == [context]
        assert (context.cancelled(), context.done(), context.code()) == (True, True, StatusCode.CANCELLED)


async def test_a_connection_that_is_lost_cancels_its_servicers() -> None:
    async with echoing() as server:
        async with peer_of(server.port) as peer:
            for stream_id in (1, 3, 5):
                await peer.call(stream_id, "hang", b"x")
            await eventually(lambda: server.seen.started == 3)
        await eventually(lambda: server.seen.cancelled == 3)
        assert len(server.seen.ended) == 3


async def test_a_call_that_is_reset_within_the_same_bytes_never_starts() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        block = peer.block(head("hang"))
        headers = len(block).to_bytes(3, "big") + b"\1\4\0\0\0\1" + block
        data = b"\0\0\5\0\1\0\0\0\1" + message(b"")
        await peer.send(headers + data + RstStreamFrame(1, error_code=CANCEL).serialize())
        await peer.ping()
        assert server.seen.started == 0


async def test_a_servicer_that_writes_to_a_caller_that_has_gone_gets_an_error_of_grpcs() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await peer.call(1, "hang", b"x")
        await eventually(lambda: server.seen.started == 1)
        await peer.send(RstStreamFrame(1, error_code=CANCEL))
        await eventually(lambda: server.seen.cancelled == 1)
        (context,) = server.seen.contexts
        for attempt in (context.write(b"y"), context.abort(StatusCode.ABORTED), context.send_initial_metadata(())):
            with pytest.raises(aio.BaseError):
                await attempt
        with pytest.raises(aio.BaseError):
            context.reply().open_wire()


async def test_a_servicer_that_waits_for_room_is_cancelled_too() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await peer.call(1, "endless", b"x" * 10_000)
        await peer.until(lambda: bool(peer.answer(1).data))
        await peer.send(RstStreamFrame(1, error_code=CANCEL))
        await eventually(lambda: not server.server.calls.tasks)


async def test_a_deadline_cancels_the_servicer_once_and_answers_with_its_status() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await peer.call(1, "hang", b"x", grpc_timeout="100m")
        answer = await peer.ended(1)
        assert (answer.status, answer.headers[-1]["grpc-message"]) == (4, "Deadline Exceeded")
        await eventually(lambda: server.seen.cancelled == 1)
        (context,) = server.seen.contexts
        assert (context.time_remaining(), context.code()) == (0, StatusCode.DEADLINE_EXCEEDED)
        assert context.cancelled() is False


async def test_a_callback_that_comes_after_the_end_is_called_at_once() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await peer.call(1, "hang", b"x", grpc_timeout="1m")
        await peer.ended(1)
        if server.seen.contexts:
            told: list[Any] = []
            server.seen.contexts[0].add_done_callback(told.append)
            assert told == server.seen.contexts


async def test_a_servicer_knows_its_caller_and_its_time() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await peer.call(1, "facts", b"", grpc_timeout="30S")
        (found,) = (await peer.ended(1)).messages
        assert found.startswith(b"('ipv4:127.0.0.1:")
        assert found.endswith(b"', True)")


async def test_a_servicer_that_never_waits_gives_way_to_others() -> None:
    async with echoing() as server, peer_of(server.port, INITIAL_WINDOW_SIZE=2**31 - 1) as peer:
        await peer.send(opened(0, 2**30))
        await peer.call(1, "endless", b"x")
        await peer.call(3, "unary", b"hello")
        async with timeout(50):
            assert (await peer.ended(3)).messages == [b"hello"]


async def test_the_messages_of_one_turn_go_out_in_one_write() -> None:
    calls: list[Any] = []

    async def collect(request: bytes, context: Any) -> None:
        calls.append(context)
        await asyncio.Event().wait()

    async with echoing() as server:
        handler = grpc.unary_stream_rpc_method_handler(collect)
        server.server.add_registered_method_handlers(SERVICE, {"collect": handler})
        async with peer_of(server.port) as peer:
            for stream_id in range(1, 101, 2):
                await peer.call(stream_id, "collect", b"")
            await eventually(lambda: len(calls) == 50)
            (connection,) = server.server.connections.open
            turns = connection.output.turns
            assert all(context.reply().open_wire().write(b"token") for context in calls)
            await peer.until(lambda: len([each for each in peer.answers.values() if each.messages]) == 50)
            assert connection.output.turns == turns + 1


async def test_each_call_has_context_variables_of_its_own() -> None:
    variable = contextvars.ContextVar("variable", default=0)

    async def add(request: bytes, context: Any) -> bytes:
        variable.set(variable.get() + 1)
        await asyncio.sleep(0)
        return str(variable.get()).encode()

    async with echoing() as server:
        server.server.add_registered_method_handlers(SERVICE, {"add": grpc.unary_unary_rpc_method_handler(add)})
        async with peer_of(server.port) as peer:
            # Long enough for the server to pause and resume its reading, which a call's task must not do in its name.
            for stream_id in range(1, 401, 2):
                await peer.call(stream_id, "add", b"x" * 1000)
            assert {(await peer.ended(stream_id)).data[5:] for stream_id in range(1, 401, 2)} == {b"1"}


async def test_interceptors_run_in_order_and_see_the_method_and_its_metadata() -> None:
    seen: list[Any] = []

    class Noting(aio.ServerInterceptor):
        def __init__(self, name: str) -> None:
            self._name = name

        async def intercept_service(self, continuation: Any, details: Any) -> Any:
            seen.append((self._name, details.method, dict(details.invocation_metadata).get("x-a")))
            return await continuation(details)

    server = Http2Server([Noting("outer"), Noting("inner")], ServerLimits(Http2Limits()))
    server.add_registered_method_handlers(SERVICE, handlers(Seen()))
    port = server.bind("127.0.0.1:0", None)
    await server.start()
    try:
        async with peer_of(port) as peer:
            await peer.call(1, "unary", b"", x_a="1")
            assert (await peer.ended(1)).status == 0
    finally:
        await server.stop(None)
    assert seen == [("outer", path("unary"), "1"), ("inner", path("unary"), "1")]


async def test_a_generic_handler_is_asked_for_what_is_not_registered() -> None:
    class Generic(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> Any:
            async def name(request: bytes, context: Any) -> bytes:
                return details.method.encode()

            return grpc.unary_unary_rpc_method_handler(name) if details.method == path("generic") else None

    async with echoing() as server:
        server.server.add_generic_rpc_handlers((Generic(),))
        async with peer_of(server.port) as peer:
            await peer.call(1, "generic", b"")
            assert (await peer.ended(1)).messages == [path("generic").encode()]
