"""RFC 9113: what a peer does wrong on one stream resets that stream, and the others go on."""

import asyncio
from typing import Any

import pytest
from hyperframe.frame import DataFrame, HeadersFrame, PriorityFrame, RstStreamFrame, SettingsFrame
from support.eventually import eventually
from support.http2.peer import Peer, head, message, opened, peer_of
from support.http2.server import echoing

PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM = 1, 3, 5, 6, 7

MALFORMED: dict[str, list[tuple[str, str]]] = {
    "no method": head("unary", method=None),
    "no scheme": head("unary", scheme=None),
    "no path": head("unary", path=None),
    "an empty path": [*head("unary", path=None), (":path", "")][::-1],
    "two paths": [(":path", "/a"), *head("unary")],
    "a pseudo-header that is not known": [(":what", "x"), *head("unary")],
    "a pseudo-header of answers": [(":status", "200"), *head("unary")],
    "a pseudo-header after others": [*head("unary", path=None), (":path", "/a")],
    "an upper-case name": head("unary", ("X-Upper", "x")),
    "an empty name": head("unary", ("", "x")),
    "a name with a blank": head("unary", ("a b", "x")),
    "a name with a colon": head("unary", ("a:b", "x")),
    "a value with a line feed": head("unary", ("a", "b\nc")),
    "a value with a carriage return": head("unary", ("a", "b\rc")),
    "a value with a zero": head("unary", ("a", "b\0c")),
    "connection": head("unary", ("connection", "close")),
    "keep-alive": head("unary", ("keep-alive", "1")),
    "proxy-connection": head("unary", ("proxy-connection", "x")),
    "transfer-encoding": head("unary", ("transfer-encoding", "chunked")),
    "upgrade": head("unary", ("upgrade", "h2c")),
    "te that is not trailers": head("unary", te="gzip"),
    "content-length that is not a number": head("unary", ("content-length", "x")),
    "content-length that is negative": head("unary", ("content-length", "-1")),
    "content-length that is empty": head("unary", ("content-length", "")),
    "content-length that is too long": head("unary", ("content-length", "1" * 19)),
    "content-length twice": head("unary", ("content-length", "0"), ("content-length", "0")),
    "content-length of another request": head("unary", ("content-length", "1"), **{":method": "GET"}),
}


async def works(peer: Peer, stream_id: int) -> bool:
    await peer.call(stream_id, "unary", b"still here")
    return (await peer.ended(stream_id)).messages == [b"still here"]


@pytest.mark.parametrize("what", MALFORMED)
async def test_a_malformed_request_is_reset_and_the_connection_lives(what: str) -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        block = peer.block(MALFORMED[what])
        await peer.send(HeadersFrame(1, block, flags=["END_HEADERS", "END_STREAM"]))
        assert (await peer.ended(1)).reset == PROTOCOL_ERROR
        assert await works(peer, 3)


@pytest.mark.parametrize("length", [0, 1, 99])
async def test_a_content_length_that_is_wrong_is_a_protocol_error(length: int) -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        block = peer.block(head("unary", ("content-length", str(length))))
        await peer.send(HeadersFrame(1, block, flags=["END_HEADERS"]))
        await peer.send(DataFrame(1, message(b"four"), flags=["END_STREAM"]))
        assert (await peer.ended(1)).reset == PROTOCOL_ERROR
        assert await works(peer, 3)


# Bytes that are no message of gRPC's must not hide it.
@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(("length", "pieces"), [(1, [b"test", b"test"]), (9, [b"test", b"test"]), (3, [b"test"])])
async def test_a_content_length_is_held_to_whatever_is_sent(length: int, pieces: list[bytes], method: str) -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        block = peer.block(head("unary", ("content-length", str(length)), **{":method": method}))
        frames = [DataFrame(1, piece) for piece in pieces]
        frames[-1].flags.add("END_STREAM")
        await peer.send(HeadersFrame(1, block, flags=["END_HEADERS"]), *frames)
        assert (await peer.ended(1)).reset == PROTOCOL_ERROR
        assert await works(peer, 3)


async def test_more_than_the_content_length_is_an_error_before_the_end() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        block = peer.block(head("gather", ("content-length", "3")))
        await peer.send(HeadersFrame(1, block, flags=["END_HEADERS"]), DataFrame(1, message(b"four")))
        assert (await peer.ended(1)).reset == PROTOCOL_ERROR
        assert await works(peer, 3)


async def test_trailers_do_not_hide_a_content_length_that_is_wrong() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        block = peer.block(head("unary", ("content-length", "10")))
        await peer.send(HeadersFrame(1, block, flags=["END_HEADERS"]), DataFrame(1, message(b"four")))
        await peer.send(HeadersFrame(1, peer.block([("a", "b")]), flags=["END_HEADERS", "END_STREAM"]))
        assert (await peer.ended(1)).reset == PROTOCOL_ERROR


async def test_a_content_length_that_is_right_is_taken() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        block = peer.block(head("unary", ("content-length", "9")))
        await peer.send(HeadersFrame(1, block, flags=["END_HEADERS"]))
        await peer.send(DataFrame(1, message(b"four"), flags=["END_STREAM"]))
        assert (await peer.ended(1)).messages == [b"four"]


async def test_data_after_the_end_is_stream_closed() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await peer.call(1, "hang", b"")
        await peer.send(DataFrame(1, b"x"))
        assert (await peer.ended(1)).reset == STREAM_CLOSED
        assert await works(peer, 3)


async def test_headers_after_the_end_are_stream_closed() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await peer.call(1, "hang", b"")
        await peer.send(HeadersFrame(1, peer.block([("a", "b")]), flags=["END_HEADERS", "END_STREAM"]))
        assert (await peer.ended(1)).reset == STREAM_CLOSED
        assert await works(peer, 3)


async def test_headers_on_a_stream_that_has_ended_end_the_connection() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await peer.call(1, "unary", b"")
        await peer.ended(1)
        await peer.send(HeadersFrame(1, peer.block(head("unary")), flags=["END_HEADERS", "END_STREAM"]))
        assert await peer.closed() == STREAM_CLOSED


async def test_data_on_a_stream_that_its_peer_has_reset_is_stream_closed() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await peer.call(1, "bidi", end=False)
        await peer.send(RstStreamFrame(1, error_code=8), DataFrame(1, b"x"))
        assert (await peer.ended(1)).reset == STREAM_CLOSED
        assert await works(peer, 3)


async def test_what_was_on_its_way_when_we_ended_a_call_early_is_ignored() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await peer.call(1, "missing", b"x", end=False)
        answer = await peer.ended(1)
        await peer.until(lambda: answer.reset is not None)
        answer.reset = None
        trailers = HeadersFrame(1, peer.block([("a", "b")]), flags=["END_HEADERS", "END_STREAM"])
        await peer.send(DataFrame(1, b"y"), trailers)
        assert await works(peer, 3)
        assert answer.reset is None
        assert peer.goaway is None


async def test_trailers_of_a_request_end_it() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await peer.call(1, "gather", b"a", b"b", end=False)
        await peer.send(HeadersFrame(1, peer.block([("x-trailer", "1")]), flags=["END_HEADERS", "END_STREAM"]))
        assert (await peer.ended(1)).messages == [b"a,b"]


@pytest.mark.parametrize("trailers", [[(":path", "/a")], [("A", "b")]])
async def test_malformed_trailers_are_a_protocol_error(trailers: list[tuple[str, str]]) -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await peer.call(1, "gather", b"a", end=False)
        await peer.send(HeadersFrame(1, peer.block(trailers), flags=["END_HEADERS", "END_STREAM"]))
        assert (await peer.ended(1)).reset == PROTOCOL_ERROR
        assert await works(peer, 3)


async def test_headers_in_the_midst_that_do_not_end_the_stream_are_a_protocol_error() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await peer.call(1, "gather", b"a", end=False)
        await peer.send(HeadersFrame(1, peer.block([("a", "b")]), flags=["END_HEADERS"]))
        assert (await peer.ended(1)).reset == PROTOCOL_ERROR


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (opened(1, 2**31 - 1), FLOW_CONTROL_ERROR),
        (b"\0\0\4\x08\0\0\0\0\1" + bytes(4), PROTOCOL_ERROR),
        (PriorityFrame(1, depends_on=1), PROTOCOL_ERROR),
        (b"\0\0\4\x02\0\0\0\0\1" + bytes(4), FRAME_SIZE_ERROR),
    ],
    ids=["a window over 2^31-1", "a window opened by 0", "a stream that depends on itself", "PRIORITY of 4 bytes"],
)
async def test_a_wrong_frame_of_one_stream_resets_it(frame: Any, code: int) -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await peer.call(1, "hang", b"x")
        await peer.send(frame)
        assert (await peer.ended(1)).reset == code
        assert await works(peer, 3)


async def test_streams_over_the_limit_are_refused() -> None:
    async with echoing(max_streams=2) as server, peer_of(server.port) as peer:
        for stream_id in (1, 3, 5):
            await peer.call(stream_id, "hang", b"x")
        assert (await peer.ended(5)).reset == REFUSED_STREAM
        await peer.send(RstStreamFrame(1, error_code=8))
        assert await works(peer, 7)


async def test_the_limit_of_streams_is_announced() -> None:
    async with echoing(max_streams=7) as server, peer_of(server.port) as peer:
        await peer.until(lambda: any(isinstance(each, SettingsFrame) for each in peer.frames))
        first = next(each for each in peer.frames if isinstance(each, SettingsFrame) and "ACK" not in each.flags)
        assert first.settings[SettingsFrame.MAX_CONCURRENT_STREAMS] == 7


# Flow control.


async def test_an_answer_keeps_to_a_window_of_one_byte() -> None:
    async with echoing() as server, peer_of(server.port, INITIAL_WINDOW_SIZE=1) as peer:
        await peer.call(1, "unary", b"abc")
        await peer.until(lambda: peer.answer(1).data_frames == [1])
        await peer.ping()
        assert peer.answer(1).data_frames == [1]
        for _ in range(7):
            await peer.send(opened(1, 1))
        assert (await peer.ended(1)).messages == [b"abc"]
        assert peer.answer(1).data_frames == [1] * 8


async def test_settings_open_and_close_the_windows_of_running_streams() -> None:
    async with echoing() as server, peer_of(server.port, INITIAL_WINDOW_SIZE=0) as peer:
        await peer.call(1, "unary", b"abc")
        await peer.until(lambda: bool(peer.answer(1).headers))
        await peer.ping()
        assert peer.answer(1).data == b""
        await peer.send(SettingsFrame(settings={4: 3}))
        await peer.ping()
        assert peer.answer(1).data_frames == [3]
        await peer.send(SettingsFrame(settings={4: 0}), opened(1, 3))
        await peer.ping()
        assert peer.answer(1).data_frames == [3]
        await peer.send(opened(1, 5))
        assert (await peer.ended(1)).messages == [b"abc"]


async def test_an_answer_keeps_to_the_window_of_the_connection() -> None:
    async with echoing() as server, peer_of(server.port, INITIAL_WINDOW_SIZE=2**31 - 1) as peer:
        await peer.call(1, "large", b"100000")
        await peer.until(lambda: len(peer.answer(1).data) >= 65_535)
        await peer.ping()
        assert len(peer.answer(1).data) == 65_535
        await peer.send(opened(0, 100_000))
        assert len((await peer.ended(1)).data) == 100_005


async def test_answers_share_the_window_of_the_connection() -> None:
    async with echoing() as server, peer_of(server.port, INITIAL_WINDOW_SIZE=2**31 - 1) as peer:
        for stream_id in (1, 3):
            await peer.call(stream_id, "large", b"1000000")
            await peer.until(lambda: bool(peer.answer(1).headers))
        await peer.ping()
        await peer.send(opened(0, 10 * 65_536))
        await peer.until(lambda: len(peer.answer(1).data) + len(peer.answer(3).data) == 11 * 65_536 - 1)
        assert min(len(peer.answer(1).data), len(peer.answer(3).data)) > 5 * 65_536 - 65_536


async def test_a_frame_is_no_larger_than_the_peer_takes() -> None:
    async with echoing() as server, peer_of(server.port, INITIAL_WINDOW_SIZE=10**6, MAX_FRAME_SIZE=20_000) as peer:
        await peer.send(opened(0, 10**6))
        await peer.call(1, "large", b"100000")
        assert max((await peer.ended(1)).data_frames) == 20_000


async def test_more_data_than_a_stream_may_be_sent_resets_it() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await peer.call(1, "hang", b"", end=False)
        # A whole message waits to be read, so the window is not opened again.
        await peer.send(DataFrame(1, message(bytes(16_000))), *[DataFrame(1, bytes(16_384))] * 70)
        assert (await peer.ended(1)).reset == FLOW_CONTROL_ERROR
        assert await works(peer, 3)


async def test_a_window_is_opened_again_as_messages_are_read() -> None:
    async with echoing() as server, peer_of(server.port, INITIAL_WINDOW_SIZE=2**24) as peer:
        await peer.send(opened(0, 2**24))
        await peer.call(1, "bidi", end=False)
        for number in range(1, 401):
            await peer.send(DataFrame(1, message(bytes(16_000))))
            await peer.until(lambda number=number: len(peer.answer(1).data) == number * 16_005)
        await peer.send(DataFrame(1, flags=["END_STREAM"]))
        assert len((await peer.ended(1)).messages) == 400


async def test_the_table_of_a_peer_that_keeps_none_is_not_used() -> None:
    async with echoing() as server, peer_of(server.port, HEADER_TABLE_SIZE=0) as peer:
        peer.decoder.max_allowed_table_size = 0
        assert await works(peer, 1)
        assert await works(peer, 3)


async def test_settings_are_acknowledged_before_what_they_allow_is_sent() -> None:
    """gRPC's core resets a stream that uses a window which was opened by settings that were not acknowledged yet."""
    async with echoing() as server, peer_of(server.port, INITIAL_WINDOW_SIZE=10) as peer:
        await peer.call(1, "large", b"100")
        await peer.until(lambda: len(peer.answer(1).data) == 10)
        await peer.send(SettingsFrame(settings={SettingsFrame.INITIAL_WINDOW_SIZE: 1000}))
        assert len((await peer.ended(1)).messages[0]) == 100
        kinds = [type(each) for each in peer.frames if isinstance(each, (SettingsFrame, DataFrame))]
        # Its own, the acknowledgement of the first, some data, the acknowledgement of the second, and the rest.
        assert kinds == [SettingsFrame, SettingsFrame, DataFrame, SettingsFrame, DataFrame]


async def test_what_is_written_to_a_client_that_has_gone_is_dropped_without_an_error() -> None:
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failures.append(context))
    async with echoing() as server:
        for _ in range(10):
            async with peer_of(server.port) as peer:
                await peer.send(opened(0, 2**30), SettingsFrame(settings={4: 2**30}))
                await peer.call(1, "endless", bytes(1000))
                await peer.until(lambda peer=peer: len(peer.answer(1).data) > 100_000)
                peer.close()  # with unread bytes: it resets the connection
        await eventually(lambda: not server.server.connections.open)
    assert not failures
