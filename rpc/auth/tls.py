"""TLS for servers and channels, from files. The identity in this process's own certificate."""

import ssl
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from pydantic import BaseModel, ConfigDict, model_validator
from typing_extensions import Self

from baton.connection.credentials import Tls, read_pem
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


class _KeyPair(NamedTuple):
    key: bytes
    cert: bytes


class TlsConfig(BaseModel):
    """PEM files. `ca` has the authorities that sign peers' certificates; `cert` and `key` are this process's own.

    `cert` and `key` must be given together. A server needs them; with `ca` it requires certificates from its callers
    (mutual TLS). A channel without `ca` trusts the authorities that gRPC trusts by default. `server_name` is the name
    in the peer's certificate, if it is not the host of the peer's address.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    server_name: str = ""

    @model_validator(mode="after")
    def _pair(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key must be given together")
        return self

    @property
    def is_mutual(self) -> bool:
        """True if a server requires certificates from its callers."""
        return self.ca is not None

    @property
    def identity(self) -> str:
        """The URI `baton://ROLE/NAME` in this process's certificate; empty without one. Raises ConfigError.

        Reading it also shows that the key belongs to the certificate, and that the certificate is valid now.
        """
        return identity_of(self.cert, self.key) if self.cert and self.key else ""

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials to listen with. Raises ConfigError if a file is missing or cannot be read."""
        pair = self._own()
        if pair is None:
            raise ConfigError("tls: a server needs cert and key")
        ca = None if self.ca is None else read_pem("tls.ca", self.ca)
        return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials to connect with. Raises ConfigError if a file cannot be read."""
        return self.for_client().channel_credentials()

    def for_client(self) -> Tls:
        """The same files, as baton.Client takes them."""
        return Tls(self.ca, self.cert, self.key, self.server_name)

    def server_context(self, section: str = "tls") -> ssl.SSLContext:
        """Like `server_credentials`, for Python's sockets. Raises ConfigError, which names `section`."""
        if self.cert is None or self.key is None:
            raise ConfigError(f"{section}: a server needs cert and key")
        context = self._context(ssl.Purpose.CLIENT_AUTH, section)
        if self.ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext:
        """Like `channel_credentials`, for Python's sockets. Raises ConfigError.

        It trusts the authorities of `ca` and no others; without `ca`, those that the system trusts.
        """
        return self._context(ssl.Purpose.SERVER_AUTH, "tls")

    def _context(self, purpose: ssl.Purpose, section: str) -> ssl.SSLContext:
        try:
            # Adds the system's authorities only where no `cafile` is given.
            context = ssl.create_default_context(purpose, cafile=self.ca)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except OSError as error:
            raise ConfigError(f"{section}: the files cannot be used: {error}") from error
        return context

    def _own(self) -> _KeyPair | None:
        if self.cert is None or self.key is None:
            return None
        return _KeyPair(read_pem("tls.key", self.key), read_pem("tls.cert", self.cert))


class TlsSection(BaseModel):
    """The key `tls`: for the calls that a process accepts, and for those that it makes. Plain text if unset."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    listen: TlsConfig | None = None
    call: TlsConfig | None = None

    @property
    def is_mutual(self) -> bool:
        """True if callers must present certificates."""
        return self.listen is not None and self.listen.is_mutual
