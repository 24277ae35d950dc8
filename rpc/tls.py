"""TLS for servers and channels, from files."""

import ssl
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

import grpc
from pydantic import BaseModel, ConfigDict, model_validator
from typing_extensions import Self

from rpc.certificates import identity_of
from rpc.errors import ConfigError


class _KeyPair(NamedTuple):
    key: bytes
    cert: bytes


class TlsConfig(BaseModel):
    """PEM files. `ca` verifies the peer; `cert` and `key` present ourselves, and come together or not at all.

    A server needs `cert` and `key`; with `ca` it also demands certificates of its callers (mutual TLS). A channel
    without `ca` trusts the certificates that gRPC trusts by default. `server_name` is what a channel expects in its
    peer's certificate; the host of the peer's address if it is empty.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    server_name: str = ""

    @model_validator(mode="after")
    def _pair(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key come together")
        return self

    @property
    def is_mutual(self) -> bool:
        """Whether a server demands certificates of its callers."""
        return self.ca is not None

    @property
    def identity(self) -> str:
        """The URI `baton://ROLE/NAME` of our own certificate; empty without one. Raises ConfigError.

        Reading it also shows that certificate and key belong together, and that it is valid now.
        """
        return identity_of(self.cert, self.key) if self.cert and self.key else ""

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials to listen with. Raises ConfigError if a file is missing or cannot be read."""
        pair = self._own()
        if pair is None:
            raise ConfigError("tls: a server needs cert and key")
        ca = self._authority()
        return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials to connect with. Raises ConfigError if a file cannot be read."""
        pair = self._own()
        if pair is None:
            return grpc.ssl_channel_credentials(self._authority())
        return grpc.ssl_channel_credentials(self._authority(), pair.key, pair.cert)

    def server_context(self) -> ssl.SSLContext:
        """What `server_credentials` is, for Python's own sockets. Raises ConfigError."""
        if self.cert is None or self.key is None:
            raise ConfigError("tls: a server needs cert and key")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._load(context)
        if self.ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext:
        """What `channel_credentials` is, for Python's own sockets. Raises ConfigError."""
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            if self.ca is not None:
                context.load_verify_locations(self.ca)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except OSError as error:
            raise ConfigError(f"tls: the files cannot be used: {error}") from error

    def _own(self) -> _KeyPair | None:
        if self.cert is None or self.key is None:
            return None
        return _KeyPair(_read("tls.key", self.key), _read("tls.cert", self.cert))

    def _authority(self) -> bytes | None:
        return None if self.ca is None else _read("tls.ca", self.ca)


class TlsSection(BaseModel):
    """The key `tls` of a process: to listen with, and to call others with. Plain text where it is not given."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    listen: TlsConfig | None = None
    call: TlsConfig | None = None

    @property
    def is_mutual(self) -> bool:
        """Whether callers must present certificates."""
        return self.listen is not None and self.listen.is_mutual


def is_loopback(host: str) -> bool:
    """Whether only this machine can be reached there, and only by itself."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path}: {error.strerror}") from error
