"""The credentials of a client: trusted authorities, its own certificate, its token.

The keys of the metadata that clients and routers exchange, and the metadata of a call.
"""

from dataclasses import dataclass
from ipaddress import ip_address
from os import PathLike

import grpc

from baton.errors import ConfigError, InvalidRequest
from baton.files import read_file

# The tenant whose quota a request counts for, and its priority; see docs/admission.md.
TENANT_KEY = "x-baton-tenant"
PRIORITY_KEY = "x-baton-priority"

# Asks for a record of the request: docs/replay.md.
RECORD_KEY = "x-baton-record"

# Trailing metadata with a Timings message, also of failed requests.
TIMINGS_KEY = "x-baton-timings-bin"

Metadata = tuple[tuple[str, str], ...]

RECORDED: Metadata = ((RECORD_KEY, "1"),)


def header(key: str, value: str) -> Metadata:
    """One pair, or none for an empty value. Raises InvalidRequest for a value that gRPC cannot send."""
    if not value.isascii() or not value.isprintable():
        raise InvalidRequest.of(key, "must be printable ASCII, as all gRPC metadata")
    return ((key, value),) if value else ()


_LARGEST_PEM_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Tls:
    """A connection over TLS. All arguments are paths of PEM files, except `server_name`.

    `ca` has the authorities to trust; without it gRPC's own list of public authorities is used. `cert` and `key` are
    the client's own certificate, for mutual TLS, and must be given together. `server_name` is the name that the
    server's certificate must have, if it is not the host of the address.
    """

    ca: str | PathLike[str] | None = None
    cert: str | PathLike[str] | None = None
    key: str | PathLike[str] | None = None
    server_name: str = ""

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Reads the files. Raises ConfigError if one cannot be read, or if only one of `cert` and `key` is given."""
        if (self.cert is None) != (self.key is None):
            raise ConfigError("tls: cert and key must be given together")
        ca = None if self.ca is None else read_pem("tls.ca", self.ca)
        if self.cert is None or self.key is None:
            return grpc.ssl_channel_credentials(ca)
        return grpc.ssl_channel_credentials(ca, read_pem("tls.key", self.key), read_pem("tls.cert", self.cert))

    def channel_options(self) -> tuple[tuple[str, str], ...]:
        """The gRPC channel options that these settings need."""
        return (("grpc.ssl_target_name_override", self.server_name),) if self.server_name else ()


def authorization(token: str, address: str, tls: Tls | None) -> Metadata:
    """The metadata that carries a token; none if it is empty.

    Raises ConfigError if the token would be sent to another machine in plain text, and InvalidRequest if it has
    characters that gRPC cannot send.
    """
    if token and tls is None and not is_loopback(address.rpartition(":")[0]):
        raise ConfigError("a token is sent over TLS only: pass tls=Tls(ca=...), or tls=Tls() for public authorities")
    return header("authorization", token and f"Bearer {token}")


def is_loopback(host: str) -> bool:
    """True if an address is only reachable from this machine."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def read_pem(name: str, path: str | PathLike[str]) -> bytes:
    """The content of a file. Raises ConfigError, which names the setting, if it cannot be read."""
    try:
        return read_file(path, _LARGEST_PEM_BYTES)
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path}: {error.strerror}") from error
