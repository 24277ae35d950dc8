"""HTTP/2's frames (RFC 9113): types, flags, error codes, how a frame is packed, and the two kinds of failures."""

import struct
from typing import Final

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITIZED: Final = 0x20

NO_ERROR: Final = 0x0
PROTOCOL_ERROR: Final = 0x1
INTERNAL_ERROR: Final = 0x2
FLOW_CONTROL_ERROR: Final = 0x3
STREAM_CLOSED: Final = 0x5
FRAME_SIZE_ERROR: Final = 0x6
REFUSED_STREAM: Final = 0x7
CANCEL: Final = 0x8
COMPRESSION_ERROR: Final = 0x9
ENHANCE_YOUR_CALM: Final = 0xB

ENABLE_PUSH: Final = 0x2
MAX_CONCURRENT_STREAMS: Final = 0x3
INITIAL_WINDOW_SIZE: Final = 0x4
MAX_FRAME_SIZE: Final = 0x5
MAX_HEADER_LIST_SIZE: Final = 0x6

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER_BYTES: Final = 9
MAX_WINDOW: Final = 2**31 - 1
MAX_STREAM_ID: Final = 2**31 - 1
DEFAULT_WINDOW: Final = 65_535
# What both sides take until they say otherwise; we never do.
DEFAULT_MAX_FRAME: Final = 16_384
LARGEST_MAX_FRAME: Final = 2**24 - 1

# Length (24 bits) and type in one number, flags, stream.
HEADER = struct.Struct(">IBI")
# The same, and gRPC's prefix of a message: whether it is compressed, and its length.
MESSAGE = struct.Struct(">IBIBI")
PREFIX = struct.Struct(">BI")
U32 = struct.Struct(">I")
SETTING = struct.Struct(">HI")


class ConnectionFailure(Exception):
    """A connection error of RFC 9113, 5.4.1: answered by GOAWAY with `code`, and the connection is closed.

    `budget` names the limit that the peer went over, for the metric; it is empty for a breach of the protocol.
    """

    def __init__(self, code: int, reason: str, budget: str = "") -> None:
        super().__init__(reason)
        self.code = code
        self.budget = budget


class StreamFailure(Exception):
    """A stream error of RFC 9113, 5.4.2: answered by RST_STREAM with `code`."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """A whole frame."""
    return HEADER.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def rst_stream(stream_id: int, code: int) -> bytes:
    """RST_STREAM."""
    return frame(RST_STREAM, 0, stream_id, U32.pack(code))


def window_update(stream_id: int, increment: int) -> bytes:
    """WINDOW_UPDATE; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream_id, U32.pack(increment))


def goaway(last_stream_id: int, code: int, reason: str = "") -> bytes:
    """GOAWAY, with `reason` for the peer's logs."""
    return frame(GOAWAY, 0, 0, U32.pack(last_stream_id) + U32.pack(code) + reason.encode("ascii", "replace"))


def settings(values: dict[int, int]) -> bytes:
    """SETTINGS."""
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(key, value) for key, value in values.items()))


def header_block(stream_id: int, block: bytes, max_frame: int, *, end_stream: bool) -> bytes:
    """HEADERS, and CONTINUATION for what does not fit into one frame."""
    flags, size = END_STREAM if end_stream else 0, len(block)
    if size <= max_frame:
        return HEADER.pack(size << 8 | HEADERS, flags | END_HEADERS, stream_id) + block
    pieces = [block[at : at + max_frame] for at in range(0, size, max_frame)]
    first, *middle, last = pieces
    return b"".join(
        [
            frame(HEADERS, flags, stream_id, first),
            *(frame(CONTINUATION, 0, stream_id, piece) for piece in middle),
            frame(CONTINUATION, END_HEADERS, stream_id, last),
        ]
    )


def unpadded(payload: bytes) -> bytes:
    """The payload of a frame with the flag PADDED, without its padding. Raises ConnectionFailure."""
    if not payload or payload[0] >= len(payload):
        raise ConnectionFailure(PROTOCOL_ERROR, "a frame has more padding than payload")
    return payload[1 : len(payload) - payload[0]]
