"""The connection between rank 0 and another rank: messages in order, and a heartbeat in both directions.

Messages between ranks as bytes: a length, a JSON header, and the message's arrays. Nothing in them is executed.
"""

import contextlib
import json
import queue
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from baton.errors import ConfigError
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.model import checkpoint
from services.engines.pytorch.model.loading import choose_device
from services.engines.pytorch.parallel.messages import Begin, Loaded, NotLoaded, Ready, ZeroBlocks
from services.engines.pytorch.runners.fused_runner import Sizes
from services.engines.pytorch.runners.step_tensors import DecodeArrays, StepArrays

_SAME = ("tensor_parallel_size", "dtype", "block_tokens", "max_context_tokens", "max_sequences", "max_step_tokens")
LENGTHS = struct.Struct("!II")
"""The bytes of a frame after this, and those of them that are its header."""


def settings_of(config: PyTorchConfig) -> dict[str, str]:
    """Returns the settings of this rank that the others must have too. Raises ConfigError without a checkpoint."""
    try:
        model = checkpoint.fingerprint(config.model)
    except OSError as error:
        raise ConfigError(f"engine.model: {config.model} cannot be read: {error}") from error
    values = {name: getattr(config, name) for name in _SAME}
    return {name: str(value) for name, value in values.items()} | {
        "device": choose_device(config).type,
        "model": model,
    }


def differences(rank: int, settings: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """Returns what is different on rank `rank`, naming the keys; empty if nothing is."""
    found = [
        f"engine.{name} is {settings.get(name)} on rank {rank} and {value} on rank 0"
        for name, value in expected.items()
        if settings.get(name) != value
    ]
    return "; ".join(found)


@dataclass(frozen=True, slots=True)
class Join:
    """A follower's first message. `settings` are names and values that must be the same on all ranks."""

    rank: int
    settings: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Welcome:
    """Rank 0's answer to Join."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Rank 0's answer to a Join that it does not accept, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Says only that the sender is there."""


@dataclass(frozen=True, slots=True)
class End:
    """Rank 0's last message: `None` among orders."""


_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(Join, Welcome, Refused, Heartbeat, End),
        *(Loaded, NotLoaded, Begin, Ready, ZeroBlocks, DecodeArrays, StepArrays),
    )
}
_DTYPES = ("int32", "int64")


def encode(message: Any) -> bytes:
    """Returns the frame of a message."""
    values: dict[str, Any] = {}
    arrays: list[tuple[str, str, int]] = []
    parts: list[bytes] = []
    for field in fields(message):
        value = getattr(message, field.name)
        if isinstance(value, np.ndarray):
            arrays.append((field.name, str(value.dtype), value.nbytes))
            parts.append(value.tobytes())
        else:
            values[field.name] = asdict(value) if isinstance(value, Sizes) else value
    header = json.dumps([type(message).__name__, values, arrays]).encode()
    body = b"".join([header, *parts])
    return LENGTHS.pack(len(body), len(header)) + body


def decode(body: bytearray, header_bytes: int) -> Any:
    """Returns the message of a frame's body, whose arrays are parts of it. Raises ValueError if it is none."""
    try:
        name, values, arrays = json.loads(body[:header_bytes])
        found = {key: _tuples(value) for key, value in values.items()}
        if name == Begin.__name__:
            found["sizes"] = Sizes(**values["sizes"])
        start = header_bytes
        for field, dtype, size in arrays:
            if dtype not in _DTYPES:
                raise ValueError(f"an array of {dtype}")
            found[field] = np.frombuffer(memoryview(body)[start : start + size], dtype=dtype)
            start += size
        return _KINDS[name](**found)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"no message of a rank: {error}") from error


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value


HANDSHAKE_BYTES = 1 << 16
_FRAME_BYTES = 1 << 28
_BEAT_SECONDS = 1.0


def send_message(connected: socket.socket, message: Any) -> None:
    """Sends one message, within the socket's timeout. Raises OSError."""
    connected.sendall(encode(message))


def receive_message(connected: socket.socket, limit: int = _FRAME_BYTES) -> Any:
    """Receives one message, within the socket's timeout. Raises OSError, EOFError at the end, and ValueError for what
    is no message, or larger than `limit` bytes.
    """
    body_bytes, header_bytes = LENGTHS.unpack(_exactly(connected, LENGTHS.size))
    if body_bytes > limit:
        raise ValueError(f"a message of {body_bytes} bytes")
    return decode(_exactly(connected, body_bytes), header_bytes)


class Link:
    """A joined rank's connection, which it owns. A peer that is silent for `lost_seconds` has ended.

    `ended` is why the connection ended, empty while it lasts. Closing it here is no end of the peer.
    """

    def __init__(self, connected: socket.socket, rank: int, lost_seconds: float) -> None:
        self.rank = rank
        self.ended = ""
        self.own_address, self.peer_address = address_of(connected.getsockname()), address_of(connected.getpeername())
        self._socket = connected
        self._lost_seconds = lost_seconds
        self._sending = threading.Lock()
        self._arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._over = threading.Event()
        self._closing = False
        self._gate = threading.Lock()
        self._listener: Callable[[str], None] = lambda _reason: None
        connected.settimeout(lost_seconds)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._threads = [
            threading.Thread(target=run, name=f"baton-rank-{rank}-{name}", daemon=True)
            for name, run in (("reader", self._read), ("heartbeat", self._beat))
        ]
        for thread in self._threads:
            thread.start()

    def on_end(self, listener: Callable[[str], None]) -> None:
        """Calls `listener` with the reason, on another thread, when the connection ends; at once if it has."""
        with self._gate:
            self._listener = listener
            reason = self.ended
        if reason:
            listener(reason)

    def send(self, message: Any, /) -> None:
        """Sends a message; None is the end. Any thread may call it. Raises OSError."""
        with self._sending:
            send_message(self._socket, End() if message is None else message)

    def recv(self, timeout: float | None = None) -> Any:
        """Returns the next message, None at the end. Raises EOFError if the peer has ended, and TimeoutError."""
        try:
            message = self._arrived.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"rank {self.rank} has sent nothing for {timeout:g} s") from None
        if isinstance(message, EOFError):
            self._arrived.put(message)
            raise message
        return None if isinstance(message, End) else message

    def close(self, patience_seconds: float = 0.0) -> None:
        """Closes the connection, once the peer has, or after the patience. May be called twice."""
        self._closing = True
        self._threads[0].join(patience_seconds)
        self._over.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._socket.close()

    def _read(self) -> None:
        try:
            while not isinstance(message := receive_message(self._socket), End):
                if not isinstance(message, Heartbeat):
                    self._arrived.put(message)
            self._arrived.put(message)
        except TimeoutError:
            self._end(f"it has been silent for {self._lost_seconds:g} s")
        except (EOFError, ConnectionResetError):
            self._end("its connection has closed")
        except (OSError, ValueError) as error:
            self._end(f"its connection has failed: {error}")

    def _beat(self) -> None:
        while not self._over.wait(_BEAT_SECONDS):
            try:
                self.send(Heartbeat())
            except OSError:  # the reader says why
                return

    def _end(self, reason: str) -> None:
        self._over.set()
        with self._gate:
            if not self._closing:
                self.ended = reason
            listener = self._listener
        self._arrived.put(EOFError(reason))
        if not self._closing:
            listener(reason)


def address_of(name: Any) -> str:
    """Returns the IP address of a socket's name; an IPv4 one also where the socket is of IPv6."""
    return str(name[0]).removeprefix("::ffff:")


def _exactly(connected: socket.socket, size: int) -> bytearray:
    found = bytearray(size)
    rest = memoryview(found)
    while rest:
        count = connected.recv_into(rest)
        if not count:
            raise EOFError
        rest = rest[count:]
    return found
