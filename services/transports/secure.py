"""TLS for the sockets of the tcp transport, with the same files as for gRPC.

A TLS socket is slower to read and to write, and its timeouts are Python's and not the system's; frames.py handles both.
"""

import socket
import ssl
from typing import Any

from baton.errors import Unauthenticated
from rpc.auth.caller import BATON_SCHEME, Caller, parse_identity
from rpc.auth.tls import TlsConfig


class OwnerTls:
    """The owner's side. With mutual TLS only workers may read."""

    def __init__(self, tls: TlsConfig) -> None:
        self._context = tls.server_context()
        # A session ticket would arrive on an idle connection, and look like unexpected data.
        self._context.num_tickets = 0
        self._is_mutual = tls.is_mutual

    def wrap(self, connection: socket.socket) -> ssl.SSLSocket:
        """Replaces the plain socket; call `shake_hands` before anything else."""
        return self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def shake_hands(self, connection: ssl.SSLSocket) -> str:
        """Returns the URI in the reader's certificate; empty without mutual TLS. Raises OSError for other readers."""
        connection.do_handshake()
        if not self._is_mutual:
            return ""
        reader = _peer(connection, is_required=True)
        assert reader is not None
        if reader.role != "worker":
            raise ConnectionError(f"{reader.name} is {reader.role}; KV is sent to workers only")
        return reader.certificate


class ReaderTls:
    """The reader's side. An owner must be a worker; with mutual TLS its certificate must say so.

    Without mutual TLS the owner's certificate need not name a role, like other servers' certificates.
    """

    def __init__(self, tls: TlsConfig) -> None:
        self._context = tls.client_context()
        self._server_name = tls.server_name
        self._is_mutual = tls.is_mutual and tls.cert is not None

    def connect(self, connection: socket.socket, host: str) -> ssl.SSLSocket:
        """Shakes hands, and verifies the owner's certificate, host name and role. Blocking. Raises OSError."""
        secure = self._context.wrap_socket(connection, server_hostname=self._server_name or host)
        try:
            owner = _peer(secure, is_required=self._is_mutual)
            if owner is not None and owner.role != "worker":
                raise ConnectionError(f"{owner.name} is {owner.role}; KV is read from workers only")
        except OSError:
            secure.close()
            raise
        return secure


def _peer(connection: ssl.SSLSocket, *, is_required: bool) -> Caller | None:
    """Returns the identity in the peer's verified certificate; None if there is none and none is required.

    Raises ConnectionError.
    """
    certificate: dict[str, Any] = connection.getpeercert() or {}
    uris = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"]
    if not is_required and not any(uri.startswith(BATON_SCHEME) for uri in uris):
        return None
    try:
        return parse_identity(uris)
    except Unauthenticated as error:
        raise ConnectionError(error.message) from None
