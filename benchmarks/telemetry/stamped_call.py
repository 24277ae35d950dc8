"""A client that knows when an answer reached its socket, by the kernel, though it reads it later.

One connection and one call at a time, blocking: gRPC over HTTP/2 with h2. Times are of the clock CLOCK_REALTIME, which
is the kernel's for packets.
"""

import socket
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, StreamEnded, StreamReset
from typing_extensions import Self

from baton.inference.v1 import generate_pb2

PATH = "/baton.inference.v1.InferenceService/Generate"
_TIMESTAMPS = 35  # SO_TIMESTAMPNS, which Python's socket module does not name
_TIMESPEC = struct.Struct("@qq")
_READ_BYTES = 1 << 16
_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Stamped:
    """A message of an answer: when it reached the socket, and when this process had read it. In nanoseconds."""

    message: generate_pb2.GenerateResponse
    arrived: int
    read: int


class StampedConnection:
    """A connection to a router. A context manager."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), _PATIENCE_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, _TIMESTAMPS, 1)
        self._connection = H2Connection(H2Configuration(client_side=True))
        self._connection.initiate_connection()
        self._flush()
        self._address = address

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def begin(self, request: generate_pb2.GenerateRequest) -> int:
        """Sends a request; returns when, in nanoseconds."""
        stream, payload = self._connection.get_next_available_stream_id(), request.SerializeToString()
        headers = [(":method", "POST"), (":scheme", "http"), (":path", PATH), (":authority", self._address)]
        self._connection.send_headers(stream, [*headers, ("te", "trailers"), ("content-type", "application/grpc")])
        self._connection.send_data(stream, b"\0" + struct.pack(">I", len(payload)) + payload, end_stream=True)
        outgoing = self._connection.data_to_send()
        started = time.time_ns()
        self._socket.sendall(outgoing)
        return started

    def answer(self) -> Iterator[Stamped]:
        """Yields the messages of the answer."""
        received, is_ended = b"", False
        while not is_ended:
            content, arrived = self._receive()
            read = time.time_ns()
            for event in self._connection.receive_data(content):
                if isinstance(event, DataReceived):
                    received += event.data
                    self._connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, StreamReset):
                    sys.exit(f"the router has reset a call: {event.error_code}")
                is_ended = is_ended or isinstance(event, StreamEnded)
            self._flush()
            while len(received) >= 5 and len(received) >= (end := 5 + int.from_bytes(received[1:5], "big")):
                yield Stamped(generate_pb2.GenerateResponse.FromString(received[5:end]), arrived, read)
                received = received[end:]

    def _receive(self) -> tuple[bytes, int]:
        """The bytes that have come, and when the last of them did."""
        content, extra, _, _ = self._socket.recvmsg(_READ_BYTES, socket.CMSG_SPACE(_TIMESPEC.size))
        if not content:
            sys.exit("the router has closed a connection")
        [stamp] = [payload for _, kind, payload in extra if kind == _TIMESTAMPS]
        seconds, nanoseconds = _TIMESPEC.unpack(stamp)
        return content, seconds * 10**9 + nanoseconds

    def _flush(self) -> None:
        if outgoing := self._connection.data_to_send():
            self._socket.sendall(outgoing)
