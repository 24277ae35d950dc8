"""The identity in this process's own certificate."""

import ssl
from pathlib import Path
from typing import Any

from baton.errors import ConfigError, Unauthenticated
from rpc.auth.caller import parse_identity


def identity_of(cert: Path, key: Path) -> str:
    """The URI `baton://ROLE/NAME` in a certificate, empty if it has none.

    Python parses only a peer's certificate, so this does a handshake with itself, in memory. It also shows that the key
    belongs to the certificate, and that the certificate is valid now. Raises ConfigError if not.
    """
    try:
        names = _shake_hands(cert, key).get("subjectAltName", ())
    except (OSError, ValueError) as error:
        raise ConfigError(f"tls.cert: {cert} with {key} cannot be used: {error}") from error
    uris = [value for kind, value in names if kind == "URI" and value.startswith("baton://")]
    if not uris:
        return ""
    try:
        return parse_identity(uris).certificate
    except Unauthenticated as error:
        raise ConfigError(f"tls.cert: {cert}: {error.message}") from error


def _shake_hands(cert: Path, key: Path) -> dict[str, Any]:
    """The certificate, as a peer that trusts it sees it."""
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(cert, key)
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = False
    client_context.load_verify_locations(cert)
    client_context.verify_flags |= 0x80000  # X509_V_FLAG_PARTIAL_CHAIN: the certificate itself is the anchor
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    client = client_context.wrap_bio(to_client, to_server)
    for side in (client, server, client):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return dict(client.getpeercert() or {})
