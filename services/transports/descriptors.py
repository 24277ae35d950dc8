"""File descriptors for other processes of the same host and user: the owner of one listens, and hands it to whoever has
the secret of the offer.

The socket is abstract: it needs no folder, and nothing of it is left behind by a process that is killed.
"""

import asyncio
import hmac
import os
import socket
import struct
from contextlib import suppress
from functools import partial

from runtime.aio import timeout, wait_until_done
from runtime.entropy import token_bytes, token_hex
from services.transports.base import TransportUnavailable

_SECRET_BYTES = 32
# For a reader to send its secret, and for an owner to answer.
_SENT_SECONDS, _ANSWER_SECONDS = 1.0, 2
# After an accept that failed, for lack of descriptors.
_PAUSE_SECONDS = 0.1
# Readers that wait at once: a flood of any user's connections takes room that the others then wait for.
_BACKLOG = 4096
# Accepted readers that have sent nothing yet: of more, the one that has hung the longest is left.
_MOST_SILENT = 64
_CREDENTIALS = struct.Struct("3i")  # process, user and group
_TIMEVAL = struct.Struct("ll")


class DescriptorOffer:
    """Hands out duplicates of a descriptor, which stays the caller's, at the socket `name`, until `close`.

    A reader that hangs delays no other. Needs a running event loop.
    """

    def __init__(self, descriptor: int) -> None:
        self.name = f"baton-{token_hex(16)}"
        self.secret = token_bytes(_SECRET_BYTES)
        self._descriptor = os.dup(descriptor)
        self._socket = _new_socket()
        self._socket.setblocking(False)
        self._socket.bind(_address(self.name))
        self._socket.listen(_BACKLOG)
        self._answering: dict[asyncio.Task[None], None] = {}  # the longest first
        self._task = asyncio.create_task(self._serve())

    async def close(self) -> None:
        """Ends the offer. What was handed out stays valid."""
        tasks = [self._task, *self._answering]
        for task in tasks:
            task.cancel()
        await wait_until_done(*tasks)
        self._socket.close()
        os.close(self._descriptor)

    async def _serve(self) -> None:
        while True:
            # A connection that waits already is accepted at once: many of them would hold the event loop up.
            await asyncio.sleep(0)
            try:
                reader, _ = await asyncio.get_running_loop().sock_accept(self._socket)
                is_own = _user_of(reader) == os.getuid()
            except OSError:
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            if not is_own:
                reader.close()
                continue
            if len(self._answering) >= _MOST_SILENT:
                longest = next(iter(self._answering))
                longest.cancel()
                await wait_until_done(longest)
            task = asyncio.create_task(self._answer(reader))
            self._answering[task] = None
            # Also runs for a task that is cancelled before it begins, which closes nothing itself.
            task.add_done_callback(partial(self._answered, reader))

    def _answered(self, reader: socket.socket, task: "asyncio.Task[None]") -> None:
        reader.close()
        self._answering.pop(task, None)

    async def _answer(self, reader: socket.socket) -> None:
        with suppress(OSError, TimeoutError):  # a reader that has left, or hangs
            async with timeout(_SENT_SECONDS):
                secret = await asyncio.get_running_loop().sock_recv(reader, _SECRET_BYTES)
            if hmac.compare_digest(secret, self.secret):
                socket.send_fds(reader, [b"\0"], [self._descriptor])


def fetch_descriptor(name: str, secret: bytes) -> int:
    """Returns the descriptor of an offer of another process, which the caller owns. Blocks for seconds at most.

    Raises TransportUnavailable if the owner has ended, hangs, is of another user or has no such offer.
    """
    with _new_socket() as owner:
        # Not `settimeout`: such a socket does not wait for room in the owner's queue.
        for limit in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            owner.setsockopt(socket.SOL_SOCKET, limit, _TIMEVAL.pack(_ANSWER_SECONDS, 0))
        try:
            owner.connect(_address(name))
            if _user_of(owner) != os.getuid():
                raise TransportUnavailable("the memory's descriptor is offered by another user")
            owner.sendall(secret)
            _, descriptors, _, _ = socket.recv_fds(owner, 1, 1)
        except BlockingIOError:
            raise TransportUnavailable("the owner does not hand over its memory's descriptor: timed out") from None
        except OSError as error:
            raise TransportUnavailable(f"the owner does not hand over its memory's descriptor: {error}") from error
    if not descriptors:
        raise TransportUnavailable("the owner refuses its memory's descriptor: it has no such offer")
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _address(name: str) -> bytes:
    return b"\0" + name.encode()


def _user_of(end: socket.socket) -> int:
    """The user of the process at the other end, or of the one that listens there."""
    _, user, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)
