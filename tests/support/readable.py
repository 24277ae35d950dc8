"""Whether a descriptor has something to read: `select.select` knows none beyond 1,023, which tests may have."""

import select
import socket


def is_readable(source: int | socket.socket, seconds: float = 0.0) -> bool:
    """True as soon as it has, within so many seconds."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
