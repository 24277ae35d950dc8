"""What is said on the tcp transport's connections, and how many bytes are said at once.

The reader begins with MAGIC and the owner's token. Then, again and again: the reader sends COUNT and that many ids as
little-endian uint32; the owner answers COUNT, the number of bytes that follow, and the blocks in the order of the ids.
An owner that has something against a request closes the connection.
"""

import contextlib
import select
import socket
import ssl
import struct
from collections.abc import Iterable, Iterator, Sequence

MAGIC = b"BATONKV1"
TOKEN_BYTES = 32
COUNT = struct.Struct("<Q")

# What one call of the system moves at most: enough to be worth it, and little enough to look at the clock in between.
_GATHERED_BYTES = 4 * 1024 * 1024
_GATHERED_VIEWS = 512
_TIMEVAL = struct.Struct("@ll")


def limit_waits(connection: socket.socket, seconds: float) -> None:
    """Makes every wait on a blocking socket end after so long, with an OSError."""
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(seconds)
        return
    value = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6) or 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def send_all(connection: socket.socket, views: Iterable[memoryview]) -> None:
    """Sends the views, many at once. Raises OSError, also when the other side does not read."""
    for gathered in _gather(views):
        if isinstance(connection, ssl.SSLSocket):
            for view in gathered:
                connection.sendall(view)
            continue
        left = gathered
        while left:
            left = _after(left, connection.sendmsg(left))


def receive_all(connection: socket.socket, views: Iterable[memoryview]) -> Iterator[None]:
    """Fills the views, many at once, and yields in between. Raises OSError, also when nothing comes."""
    for gathered in _gather(views):
        left = gathered
        while left:
            count = _receive_some(connection, left)
            if not count:
                raise ConnectionError("the other side closed the connection")
            left = _after(left, count)
        yield


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """The next bytes. Raises OSError."""
    received = bytearray(size)
    for _ in receive_all(connection, [memoryview(received)]):
        pass
    return bytes(received)


def is_silent(connection: socket.socket) -> bool:
    """Whether nothing has come on an idle connection: not even its end."""
    poll = select.poll()
    poll.register(connection, select.POLLIN | select.POLLRDHUP)
    return not poll.poll(0)


def shut(connection: socket.socket) -> None:
    """Wakes a thread that waits on the socket; merely closing it would not."""
    with contextlib.suppress(OSError):
        # Not the method of a TLS socket, which would go on in plain text.
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
    """What is left of the views after `count` bytes."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []
