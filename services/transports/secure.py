"""TLS around the tcp transport's sockets, where the configuration has it: the same files as for gRPC.

Reading and writing such a socket is slower, and its waits are Python's and not the system's; frames.py knows both.
"""

import socket
import ssl
from typing import Any

from rpc.caller import parse_identity
from rpc.errors import Unauthenticated
from rpc.tls import TlsConfig


class OwnerTls:
    """The owner's side. Where callers need certificates, a reader has to be a worker."""

    def __init__(self, tls: TlsConfig) -> None:
        self._context = tls.server_context()
        # They would lie on an idle connection, and look like something that came on it.
        self._context.num_tickets = 0
        self._is_mutual = tls.is_mutual

    def wrap(self, connection: socket.socket) -> ssl.SSLSocket:
        """The socket, which from now on is this one; `shake_hands` comes before everything else."""
        return self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def shake_hands(self, connection: ssl.SSLSocket) -> None:
        """Raises OSError for a reader that is not to be served."""
        connection.do_handshake()
        if not self._is_mutual:
            return
        certificate: dict[str, Any] = connection.getpeercert() or {}
        names = certificate.get("subjectAltName", ())
        try:
            reader = parse_identity([value for kind, value in names if kind == "URI"])
        except Unauthenticated as error:
            raise ConnectionError(error.message) from None
        if reader.role != "worker":
            raise ConnectionError(f"{reader.name} is {reader.role}; the pool is for workers")


class ReaderTls:
    """The reader's side."""

    def __init__(self, tls: TlsConfig) -> None:
        self._context = tls.client_context()
        self._server_name = tls.server_name

    def connect(self, connection: socket.socket, host: str) -> ssl.SSLSocket:
        """The socket, with hands shaken and the owner's certificate verified. Blocking. Raises OSError."""
        return self._context.wrap_socket(connection, server_hostname=self._server_name or host)
