"""A connection without a socket: what the event loop would do to it, done by a test."""

import asyncio
import time

from support.calibration import here

# Of CPU, that one read of a connection may take; collecting garbage is in it.
HELD_UP_SECONDS = 0.25


class Pipe(asyncio.Transport):
    """A transport that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1)})
        self.is_closed = False
        self.written = b""

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.written += bytes(data)

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def converse(connection: asyncio.Protocol, data: bytes, cuts: list[int]) -> Pipe:
    """Gives a connection the bytes, cut into reads, and takes the connection away again."""
    pipe = Pipe()
    connection.connection_made(pipe)
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        began = time.process_time()
        connection.data_received(data[start:end])
        spent = time.process_time() - began
        assert spent < HELD_UP_SECONDS or spent < here(HELD_UP_SECONDS)
        await asyncio.sleep(0)
        if pipe.is_closed:
            break
    for _ in range(3):
        await asyncio.sleep(0)
    connection.connection_lost(None)
    return pipe


def failures_of(loop: asyncio.AbstractEventLoop) -> list[str]:
    """The errors that nothing caught, as the event loop reports them from now on."""
    found: list[str] = []
    loop.set_exception_handler(lambda _, context: found.append(repr(context.get("exception", context["message"]))))
    return found


def kinds_of_frames(data: bytes) -> set[int]:
    """The types of the frames; fails if the last is cut."""
    found, at = set(), 0
    while at < len(data):
        found.add(data[at + 3])
        at += 9 + int.from_bytes(data[at : at + 3], "big")
    assert at == len(data)
    return found
