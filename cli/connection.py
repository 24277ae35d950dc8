"""The connection of a command to the router, and its credentials, from its options and the environment."""

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import SecretStr

from baton import AsyncClient, Resume
from baton.errors import ConfigError
from baton.files import read_file
from cli.address import find_address
from rpc.auth.tls import TlsConfig

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

_LARGEST_TOKEN_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials of a connection: in plain text without `tls`, and anonymously without `token`."""

    tls: TlsConfig | None = None
    token: SecretStr = field(default=SecretStr(""))


def find_credentials(arguments: argparse.Namespace) -> Credentials:
    """From the options, else from $BATON_CA, $BATON_CERT, $BATON_KEY, $BATON_TLS, $BATON_TOKEN_FILE and $BATON_TOKEN.

    Raises ConfigError if a file cannot be read, or if only one of certificate and key is given.
    """
    ca, cert, key = (_path(arguments, name) for name in ("ca", "cert", "key"))
    is_secure = bool(ca or cert or key or arguments.tls or os.environ.get("BATON_TLS"))
    if (cert is None) != (key is None):
        raise ConfigError("--cert and --key must be given together")
    return Credentials(TlsConfig(ca=ca, cert=cert, key=key) if is_secure else None, _token(arguments))


def _path(arguments: argparse.Namespace, name: str) -> Path | None:
    given = getattr(arguments, name) or os.environ.get(f"BATON_{name.upper()}")
    return Path(given) if given else None


def _token(arguments: argparse.Namespace) -> SecretStr:
    path = _path(arguments, "token_file")
    if path is None:
        return SecretStr(os.environ.get("BATON_TOKEN", ""))
    try:
        return SecretStr(read_file(path, _LARGEST_TOKEN_BYTES).decode().strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file: cannot read {path}: {error}") from error


def connect(
    arguments: argparse.Namespace,
    tenant: str = "",
    tracer_provider: "TracerProvider | None" = None,
    resume: Resume | None = None,
) -> AsyncClient:
    """A client of the router for `tenant`. Raises ConfigError, and InvalidRequest for an invalid tenant."""
    credentials = find_credentials(arguments)
    token = credentials.token.get_secret_value()
    tls = credentials.tls.for_client() if credentials.tls else None
    return AsyncClient(
        find_address(arguments.address).value,
        tls=tls,
        token=token,
        tenant=tenant,
        resume=resume,
        tracer_provider=tracer_provider,
    )
