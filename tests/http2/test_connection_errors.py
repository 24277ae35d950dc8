"""RFC 9113: what a peer does wrong ends its connection, with the error that the RFC names."""

from collections.abc import Callable

import pytest
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
)
from support.http2.peer import PREFACE, Peer, head, opened, peer_of, silent_peer
from support.http2.server import echoing

NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED = 0, 1, 3, 5
FRAME_SIZE_ERROR, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 6, 9, 11


def raw(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream_id.to_bytes(4, "big") + payload


def headers(peer: Peer, stream_id: int, *, end: bool = False) -> HeadersFrame:
    flags = ["END_HEADERS", "END_STREAM"] if end else ["END_HEADERS"]
    return HeadersFrame(stream_id, peer.block(head("unary")), flags=flags)


Wrong = Callable[[Peer], list[object]]

WRONG: dict[str, tuple[int, Wrong]] = {
    "DATA on stream 0": (PROTOCOL_ERROR, lambda peer: [raw(0, 0, 0, b"x")]),
    "DATA on an idle stream": (PROTOCOL_ERROR, lambda peer: [DataFrame(1, b"x")]),
    "HEADERS on stream 0": (PROTOCOL_ERROR, lambda peer: [raw(1, 4, 0, b"\x82")]),
    "HEADERS on a server's stream": (PROTOCOL_ERROR, lambda peer: [headers(peer, 2)]),
    "HEADERS on a lower stream": (STREAM_CLOSED, lambda peer: [headers(peer, 5, end=True), headers(peer, 3)]),
    "PRIORITY on stream 0": (PROTOCOL_ERROR, lambda peer: [raw(2, 0, 0, bytes(5))]),
    "RST_STREAM on stream 0": (PROTOCOL_ERROR, lambda peer: [raw(3, 0, 0, bytes(4))]),
    "RST_STREAM on an idle stream": (PROTOCOL_ERROR, lambda peer: [RstStreamFrame(1)]),
    "RST_STREAM of 3 bytes": (FRAME_SIZE_ERROR, lambda peer: [headers(peer, 1), raw(3, 0, 1, bytes(3))]),
    "SETTINGS on a stream": (PROTOCOL_ERROR, lambda peer: [raw(4, 0, 1)]),
    "SETTINGS of 5 bytes": (FRAME_SIZE_ERROR, lambda peer: [raw(4, 0, 0, bytes(5))]),
    "SETTINGS that acknowledges and says more": (FRAME_SIZE_ERROR, lambda peer: [raw(4, 1, 0, bytes(6))]),
    "ENABLE_PUSH of 2": (PROTOCOL_ERROR, lambda peer: [SettingsFrame(settings={2: 2})]),
    "INITIAL_WINDOW_SIZE of 2^31": (FLOW_CONTROL_ERROR, lambda peer: [SettingsFrame(settings={4: 2**31})]),
    "MAX_FRAME_SIZE of 16383": (PROTOCOL_ERROR, lambda peer: [SettingsFrame(settings={5: 16_383})]),
    "MAX_FRAME_SIZE of 2^24": (PROTOCOL_ERROR, lambda peer: [SettingsFrame(settings={5: 2**24})]),
    "PUSH_PROMISE": (
        PROTOCOL_ERROR,
        lambda peer: [headers(peer, 1), PushPromiseFrame(1, promised_stream_id=2, flags=["END_HEADERS"])],
    ),
    "PING on a stream": (PROTOCOL_ERROR, lambda peer: [raw(6, 0, 1, bytes(8))]),
    "PING of 7 bytes": (FRAME_SIZE_ERROR, lambda peer: [raw(6, 0, 0, bytes(7))]),
    "GOAWAY on a stream": (PROTOCOL_ERROR, lambda peer: [raw(7, 0, 1, bytes(8))]),
    "GOAWAY of 7 bytes": (FRAME_SIZE_ERROR, lambda peer: [raw(7, 0, 0, bytes(7))]),
    "WINDOW_UPDATE of 0": (PROTOCOL_ERROR, lambda peer: [raw(8, 0, 0, bytes(4))]),
    "WINDOW_UPDATE of 3 bytes": (FRAME_SIZE_ERROR, lambda peer: [raw(8, 0, 0, bytes(3))]),
    "WINDOW_UPDATE on an idle stream": (PROTOCOL_ERROR, lambda peer: [opened(1, 1)]),
    "a window over 2^31-1": (FLOW_CONTROL_ERROR, lambda peer: [opened(0, 2**31 - 1)]),
    "a stream's window over 2^31-1 by SETTINGS": (
        FLOW_CONTROL_ERROR,
        lambda peer: [headers(peer, 1), opened(1, 2**31 - 65_536), SettingsFrame(settings={4: 65_536})],
    ),
    "CONTINUATION of nothing": (PROTOCOL_ERROR, lambda peer: [ContinuationFrame(1, b"")]),
    "CONTINUATION of another stream": (
        PROTOCOL_ERROR,
        lambda peer: [HeadersFrame(1, peer.block(head("unary"))), ContinuationFrame(3, b"", flags=["END_HEADERS"])],
    ),
    "a header block that is interrupted": (
        PROTOCOL_ERROR,
        lambda peer: [HeadersFrame(1, peer.block(head("unary"))), PingFrame()],
    ),
    "a header block that an unknown frame interrupts": (
        PROTOCOL_ERROR,
        lambda peer: [HeadersFrame(1, peer.block(head("unary"))), raw(0x16, 0, 0, b"x")],
    ),
    "a frame over 16384 bytes": (FRAME_SIZE_ERROR, lambda peer: [raw(0, 0, 1, bytes(16_385))]),
    "more padding than DATA": (PROTOCOL_ERROR, lambda peer: [headers(peer, 1), raw(0, 8, 1, b"\x05abc")]),
    "padding that is not there": (PROTOCOL_ERROR, lambda peer: [headers(peer, 1), raw(0, 8, 1)]),
    "more padding than HEADERS": (PROTOCOL_ERROR, lambda peer: [raw(1, 12, 1, b"\x20\x82")]),
    "HEADERS without room for its priority": (FRAME_SIZE_ERROR, lambda peer: [raw(1, 0x24, 1, b"\x82")]),
    "HEADERS that depends on itself": (PROTOCOL_ERROR, lambda peer: [raw(1, 0x24, 1, b"\x00\x00\x00\x01\x10\x82")]),
    "an index that is in no table": (COMPRESSION_ERROR, lambda peer: [raw(1, 5, 1, b"\xff\x7f")]),
    "index 0": (COMPRESSION_ERROR, lambda peer: [raw(1, 5, 1, b"\x80")]),
    "a block that ends within an integer": (COMPRESSION_ERROR, lambda peer: [raw(1, 5, 1, b"\xff")]),
    "a block that ends within a string": (COMPRESSION_ERROR, lambda peer: [raw(1, 5, 1, b"\x00\x05ab")]),
    "an integer without end": (COMPRESSION_ERROR, lambda peer: [raw(1, 5, 1, b"\xff" + b"\x80" * 20)]),
    "a string that is not in Huffman's code": (
        COMPRESSION_ERROR,
        lambda peer: [raw(1, 5, 1, b"\x00\x84\xff\xff\xff\xff\x00")],
    ),
    "a table size over the limit": (COMPRESSION_ERROR, lambda peer: [raw(1, 5, 1, b"\x3f\xe2\x1f\x82")]),
    "a table size after a field": (COMPRESSION_ERROR, lambda peer: [raw(1, 5, 1, b"\x82\x20")]),
}


@pytest.mark.parametrize("what", WRONG)
async def test_a_breach_of_the_protocol_ends_the_connection_with_its_error(what: str) -> None:
    code, wrong = WRONG[what]
    async with echoing() as server, peer_of(server.port) as peer:
        await peer.send(*wrong(peer))
        assert await peer.closed() == code


@pytest.mark.parametrize("text", [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nXX", bytes(64)])
async def test_what_is_not_http2_is_not_served(text: bytes) -> None:
    async with echoing() as server, silent_peer(server.port) as peer:
        await peer.send(text)
        assert await peer.closed() == PROTOCOL_ERROR


async def test_the_first_frame_must_be_settings() -> None:
    async with echoing() as server, silent_peer(server.port) as peer:
        await peer.send(PREFACE, PingFrame())
        assert await peer.closed() == PROTOCOL_ERROR


async def test_a_preface_may_come_byte_by_byte() -> None:
    async with echoing() as server, silent_peer(server.port) as peer:
        for byte in PREFACE + SettingsFrame().serialize():
            await peer.send(bytes([byte]))
        await peer.call(1, "unary", b"hello")
        assert (await peer.ended(1)).messages == [b"hello"]


async def test_a_goaway_names_the_last_stream() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await peer.call(7, "unary", b"x")
        await peer.ended(7)
        await peer.send(raw(6, 0, 1, bytes(8)))
        await peer.closed()
        assert peer.goaway is not None
        assert peer.goaway.last_stream_id == 7


async def test_frames_of_unknown_types_are_ignored() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await peer.send(raw(0x16, 0xFF, 0, b"what"), raw(0xFF, 0, 5, b"ever"))
        await peer.call(1, "unary", b"hello")
        assert (await peer.ended(1)).messages == [b"hello"]


async def test_unknown_settings_and_flags_are_ignored() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await peer.send(SettingsFrame(settings={0x99: 7}), raw(6, 0xFE, 0, b"12345678"))
        await peer.until(lambda: any(isinstance(each, PingFrame) for each in peer.frames))


async def test_settings_are_acknowledged() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await peer.until(lambda: any(isinstance(each, SettingsFrame) and "ACK" in each.flags for each in peer.frames))


async def test_a_ping_is_answered_with_its_content() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await peer.send(PingFrame(opaque_data=b"abcdefgh"))
        await peer.until(
            lambda: any(isinstance(each, PingFrame) and each.opaque_data == b"abcdefgh" for each in peer.frames)
        )


async def test_priorities_of_idle_streams_are_allowed() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await peer.send(PriorityFrame(101, depends_on=0, stream_weight=1))
        await peer.call(1, "unary", b"hello")
        assert (await peer.ended(1)).messages == [b"hello"]


async def test_a_header_block_may_come_in_pieces() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        block = peer.block(head("unary"))
        await peer.send(HeadersFrame(1, block[:7]), ContinuationFrame(1, block[7:20]))
        await peer.send(ContinuationFrame(1, block[20:], flags=["END_HEADERS"]))
        await peer.send(DataFrame(1, b"\0\0\0\0\2hi", flags=["END_STREAM"]))
        assert (await peer.ended(1)).messages == [b"hi"]


async def test_padding_and_priority_are_no_part_of_headers_and_data() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        flags = ["END_HEADERS", "PADDED", "PRIORITY"]
        await peer.send(HeadersFrame(1, peer.block(head("unary")), pad_length=9, depends_on=0, flags=flags))
        await peer.send(DataFrame(1, b"\0\0\0\0\2hi", pad_length=200, flags=["END_STREAM", "PADDED"]))
        assert (await peer.ended(1)).messages == [b"hi"]
