"""The messages on the tcp transport's connections, and how they are sent and received.

The reader sends MAGIC and the owner's token. Then, for each request, the reader sends ID_LENGTH and a handoff's id, and
COUNT and as many block ids as little-endian uint32. The owner answers COUNT, the number of bytes that follow, and the
blocks in the order of the ids. All of them must belong to the handoff.

The owner closes the connection to refuse a request.
"""

import contextlib
import select
import socket
import ssl
import struct
from collections.abc import Iterable, Iterator, Sequence

from runtime.clock import monotonic

MAGIC = b"BATONKV2"
TOKEN_BYTES = 32
COUNT = struct.Struct("<Q")
ID_LENGTH = struct.Struct("<B")

# The most bytes of one system call: enough to be efficient, and few enough to check the clock often.
_GATHERED_BYTES = 4 * 1024 * 1024
_GATHERED_VIEWS = 512
_TIMEVAL = struct.Struct("@ll")


def limit_waits(connection: socket.socket, seconds: float) -> None:
    """Sets a timeout for every wait on a blocking socket, which raises an OSError."""
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(seconds)
        return
    value = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6) or 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def send_all(connection: socket.socket, views: Iterable[memoryview]) -> None:
    """Sends the views, several in one call. Raises OSError, also if the peer does not read."""
    for gathered in _gather(views):
        if isinstance(connection, ssl.SSLSocket):
            for view in gathered:
                connection.sendall(view)
            continue
        left = gathered
        while left:
            left = _after(left, connection.sendmsg(left))


def receive_all(connection: socket.socket, views: Iterable[memoryview]) -> Iterator[None]:
    """Fills the views, several in one call, and yields in between. Raises OSError, also if no bytes arrive."""
    for gathered in _gather(views):
        left = gathered
        while left:
            count = _receive_some(connection, left)
            if not count:
                raise ConnectionError("the peer closed the connection")
            left = _after(left, count)
        yield


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Returns this many bytes. Raises OSError."""
    received = bytearray(size)
    for _ in receive_all(connection, [memoryview(received)]):
        pass
    return bytes(received)


def receive_before(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Returns this many bytes if they all arrive before `deadline` of the monotonic clock. Raises OSError."""
    received = bytearray(size)
    left = [memoryview(received)]
    while left:
        remaining = deadline - monotonic()
        if remaining <= 0:
            raise TimeoutError("deadline exceeded")
        limit_waits(connection, remaining)
        count = connection.recv_into(left[0])
        if not count:
            raise ConnectionError("the peer closed the connection")
        left = _after(left, count)
    return bytes(received)


def is_silent(connection: socket.socket) -> bool:
    """True if an idle connection is open, and has received nothing."""
    poll = select.poll()
    poll.register(connection, select.POLLIN | select.POLLRDHUP)
    return not poll.poll(0)


def shut(connection: socket.socket) -> None:
    """Wakes a thread that waits on the socket; closing the socket would not."""
    with contextlib.suppress(OSError):
        # Not a TLS socket's own method, which would continue in plain text.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _receive_some(connection: socket.socket, views: Sequence[memoryview]) -> int:
    if isinstance(connection, ssl.SSLSocket):
        return connection.recv_into(views[0])
    return connection.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]


def _gather(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    gathered: list[memoryview] = []
    size = 0
    for view in views:
        for start in range(0, len(view), _GATHERED_BYTES):
            part = view[start : start + _GATHERED_BYTES]
            if gathered and (size + len(part) > _GATHERED_BYTES or len(gathered) == _GATHERED_VIEWS):
                yield gathered
                gathered, size = [], 0
            gathered.append(part)
            size += len(part)
    if gathered:
        yield gathered


def _after(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """Returns the views without their first `count` bytes."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []
