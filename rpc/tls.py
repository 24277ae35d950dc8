"""TLS for servers and channels, from files."""

from pathlib import Path
from typing import NamedTuple

import grpc
from pydantic import BaseModel, ConfigDict, model_validator
from typing_extensions import Self

from rpc.errors import ConfigError


class _KeyPair(NamedTuple):
    key: bytes
    cert: bytes


class TlsConfig(BaseModel):
    """PEM files. `ca` verifies the peer; `cert` and `key` present ourselves, and come together or not at all.

    A server needs `cert` and `key`; with `ca` it also demands certificates of its callers (mutual TLS). A channel
    without `ca` trusts the certificates that gRPC trusts by default.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @model_validator(mode="after")
    def _pair(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key come together")
        return self

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

    def _own(self) -> _KeyPair | None:
        if self.cert is None or self.key is None:
            return None
        return _KeyPair(_read("tls.key", self.key), _read("tls.cert", self.cert))

    def _authority(self) -> bytes | None:
        return None if self.ca is None else _read("tls.ca", self.ca)


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path}: {error.strerror}") from error
