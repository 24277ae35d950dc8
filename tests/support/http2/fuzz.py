"""HTTP/2 conversations for the fuzzer: valid ones, and mutations of their frames."""

import random
from collections.abc import Callable, Sequence

from hpack import Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from support.http2.peer import PREFACE, head, message

_METHODS = ("unary", "count", "large", "gather", "bidi", "hang", "endless", "abort", "metadata", "missing")
_BODIES = (b"", b"1", b"20", b"x" * 300)
_NUMBERS = (0, 1, 2, 3, 5, 2**14, 2**14 + 1, 2**16, 2**24 - 1, 2**31 - 1, 2**31, 2**32 - 1)


def conversation(source: random.Random, calls: int) -> list[bytes]:
    """The frames of some calls, as a client sends them."""
    encoder = Encoder()
    frames: list[Frame] = [SettingsFrame(settings={4: source.choice((0, 100, 65_535, 2**20))})]
    for stream_id in range(1, 2 * calls, 2):
        frames += _call(source, encoder, stream_id)
    return [each.serialize() for each in frames]


def answers(source: random.Random) -> list[bytes]:
    """The frames of a server that answers one call, on stream 1."""
    encoder = Encoder()
    head, trailers = [(":status", "200"), ("content-type", "application/grpc")], [("grpc-status", "0")]
    details = [("grpc-message", "a%20b"), ("x-bin", "AAEC"), ("x-a", "a" * source.randrange(40))]
    settings = SettingsFrame(settings={4: source.choice((0, 100, 65_535, 2**20))})
    if source.random() < 0.1:
        whole = HeadersFrame(1, encoder.encode(head + trailers + details), flags=["END_HEADERS", "END_STREAM"])
        return [settings.serialize(), whole.serialize()]
    frames: list[Frame] = [settings, *_block(source, encoder.encode(head), [])]
    body = b"".join(message(source.choice(_BODIES)) for _ in range(source.randrange(8)))
    while body:
        size = source.randrange(1, 400)
        frames += [DataFrame(1, body[:size]), *_control(source, 1)]
        body = body[size:]
    if source.random() < 0.2:
        frames.append(GoAwayFrame(0, last_stream_id=source.choice((0, 1, 2**31 - 1))))
    if source.random() < 0.9:
        frames += _block(source, encoder.encode(trailers + details[: source.randrange(4)]), ["END_STREAM"])
    return [each.serialize() for each in frames]


def mutated(source: random.Random, frames: Sequence[bytes]) -> list[bytes]:
    """The same frames, of which some are changed, repeated, left out, moved or replaced by others."""
    out = list(frames)
    for _ in range(source.randrange(1, 5)):
        source.choice(_MUTATIONS)(source, out)
    return out


def wire(frames: Sequence[bytes]) -> bytes:
    """The part of a conversation that is sent."""
    return PREFACE + b"".join(frames)


def _call(source: random.Random, encoder: Encoder, stream_id: int) -> list[Frame]:
    block = encoder.encode(head(source.choice(_METHODS), ("x-a", "a" * source.randrange(40))))
    body = b"".join(message(source.choice(_BODIES)) for _ in range(source.randrange(3)))
    data = DataFrame(stream_id, body, flags=source.choice(([], ["END_STREAM"], ["END_STREAM"])))
    return [*_block(source, block, [], stream_id), data, *_control(source, stream_id)]


def _block(source: random.Random, block: bytes, flags: list[str], stream_id: int = 1) -> list[Frame]:
    """A header block, in one frame or in two."""
    if source.random() < 0.2:
        cut = source.randrange(len(block))
        first = HeadersFrame(stream_id, block[:cut], flags=flags)
        return [first, ContinuationFrame(stream_id, block[cut:], flags=["END_HEADERS"])]
    return [HeadersFrame(stream_id, block, flags=["END_HEADERS", *flags])]


def _control(source: random.Random, stream_id: int) -> list[Frame]:
    """Up to two frames of other kinds."""
    others: list[Frame] = [
        PingFrame(opaque_data=b"12345678"),
        PriorityFrame(stream_id, depends_on=0),
        RstStreamFrame(stream_id, error_code=8),
        WindowUpdateFrame(stream_id, window_increment=1000),
        WindowUpdateFrame(0, window_increment=1000),
        SettingsFrame(settings={4: source.randrange(2**17)}),
    ]
    return source.sample(others, source.randrange(3))


Mutation = Callable[[random.Random, list[bytes]], None]


def _change_byte(source: random.Random, frames: list[bytes]) -> None:
    at = source.randrange(len(frames))
    changed = bytearray(frames[at])
    changed[source.randrange(len(changed))] = source.randrange(256)
    frames[at] = bytes(changed)


def _change_header(source: random.Random, frames: list[bytes]) -> None:
    """The type, the flags or the stream of a frame, which keeps its length."""
    at = source.randrange(len(frames))
    changed = bytearray(frames[at])
    place = min(source.choice((3, 4, 8)), len(changed) - 1)
    changed[place] = source.choice(
        (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0x24, 0x2D, 0xFF, changed[place] ^ 1 << source.randrange(8))
    )
    frames[at] = bytes(changed)


def _change_number(source: random.Random, frames: list[bytes]) -> None:
    at = source.randrange(len(frames))
    changed = bytearray(frames[at])
    if len(changed) >= 13:
        place = source.randrange(9, len(changed) - 3)
        changed[place : place + 4] = source.choice(_NUMBERS).to_bytes(4, "big")
    frames[at] = bytes(changed)


def _change_payload(source: random.Random, frames: list[bytes]) -> None:
    """Another payload, of its own length."""
    at = source.randrange(len(frames))
    payload = source.randbytes(source.choice((0, 1, 4, 5, 8, 9, 100)))
    frames[at] = len(payload).to_bytes(3, "big") + frames[at][3:9] + payload


def _repeat(source: random.Random, frames: list[bytes]) -> None:
    at = source.randrange(len(frames))
    frames[at:at] = [frames[at]] * source.randrange(1, 4)


def _leave_out(source: random.Random, frames: list[bytes]) -> None:
    if len(frames) > 1:
        del frames[source.randrange(len(frames))]


def _move(source: random.Random, frames: list[bytes]) -> None:
    frames.insert(source.randrange(len(frames)), frames.pop(source.randrange(len(frames))))


def _cut(source: random.Random, frames: list[bytes]) -> None:
    at = source.randrange(len(frames))
    frames[at] = frames[at][: source.randrange(len(frames[at]))] or b"\0"


_MUTATIONS: tuple[Mutation, ...] = (
    _change_byte,
    _change_byte,
    _change_header,
    _change_number,
    _change_payload,
    _repeat,
    _leave_out,
    _move,
    _cut,
)
