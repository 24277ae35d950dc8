"""TLS for HTTP/2 (RFC 9113, 9.2), and who a connection's peer has proven to be."""

import ssl
from collections.abc import Mapping, Sequence
from typing import Any, Final

AuthContext = Mapping[str, Sequence[bytes]]

INSECURE: Final[AuthContext] = {
    "transport_security_type": (b"insecure",),
    "security_level": (b"TSI_SECURITY_NONE",),
}
_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
# What gRPC calls the kinds of subject alternative names.
_KINDS: Final = {"URI": "peer_uri", "DNS": "peer_dns", "email": "peer_email", "IP Address": "peer_ip"}


def require_http2(context: ssl.SSLContext) -> ssl.SSLContext:
    """The same context, which takes what HTTP/2 asks of TLS and nothing less."""
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_ciphers(_CIPHERS)
    context.set_alpn_protocols(["h2"])
    return context


def auth_context(connection: ssl.SSLObject | None) -> AuthContext:
    """gRPC's authentication context: of a verified certificate its names, and itself as PEM."""
    if connection is None:
        return INSECURE
    found: dict[str, list[bytes]] = {
        "transport_security_type": [b"ssl"],
        "security_level": [b"TSI_PRIVACY_AND_INTEGRITY"],
        "ssl_session_reused": [b"true" if connection.session_reused else b"false"],
    }
    certificate = connection.getpeercert(binary_form=True)
    if certificate:
        found["x509_pem_cert"] = [ssl.DER_cert_to_PEM_cert(certificate).encode()]
        _add_names(found, connection)
    return found


def peer_identity_key(context: AuthContext) -> str | None:
    """Under which key the context has the peer's identities; None if it has proven none."""
    return next((key for key in ("x509_subject_alternative_name", "x509_common_name") if key in context), None)


def _add_names(found: dict[str, list[bytes]], connection: ssl.SSLObject) -> None:
    certificate: dict[str, Any] = dict(connection.getpeercert() or {})
    for parts in certificate.get("subject", ()):
        for kind, value in parts:
            if kind == "commonName":
                found["x509_common_name"] = [str(value).encode()]
    for kind, value in certificate.get("subjectAltName", ()):
        found.setdefault("x509_subject_alternative_name", []).append(str(value).encode())
        if kind in _KINDS:
            found.setdefault(_KINDS[kind], []).append(str(value).encode())
