"""A wait for something to read, by poll: `select.select` knows no descriptor beyond 1,023, and tests may have more."""

import select
import socket


def is_readable(source: int | socket.socket, seconds: float = 0.0) -> bool:
    """True as soon as it has, within so many seconds."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
