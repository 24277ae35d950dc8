"""Channels to peers, with the options that all of Baton's connections share."""

from collections.abc import Callable, Mapping

import grpc
from grpc import aio

from baton.connection.channels import CHANNEL_OPTIONS
from rpc.auth.tls import TlsConfig
from rpc.tracing.channel import TracedChannel


def open_channel(
    address: str, tls: TlsConfig | None = None, *, replaced_options: Mapping[str, int] | None = None
) -> aio.Channel:
    """A channel to `host:port`: `async with open_channel(address) as channel: ...`. Connects on first use.

    With `tls` the peer's certificate must be signed by its `ca`, and this process presents its `cert`. Raises
    ConfigError if a file cannot be read. `replaced_options` are for peers outside of Baton. Calls made within a span
    carry its context.
    """
    options: dict[str, int | str] = {**dict(CHANNEL_OPTIONS), **(replaced_options or {})}
    if tls is None:
        return _open(address, None, options)
    return _open(address, tls.channel_credentials(), {**options, **_expected(tls)})


# Opens a channel to an address, always with the same credentials.
Dial = Callable[[str], aio.Channel]


def dialer(tls: TlsConfig | None) -> Dial:
    """Like `open_channel`, with the files read now, so that later calls cannot fail. Raises ConfigError."""
    credentials = None if tls is None else tls.channel_credentials()
    options: dict[str, int | str] = {**dict(CHANNEL_OPTIONS), **(_expected(tls) if tls else {})}
    return lambda address: _open(address, credentials, options)


def _open(address: str, credentials: grpc.ChannelCredentials | None, options: Mapping[str, int | str]) -> aio.Channel:
    return TracedChannel(connect(address, credentials, options))


def connect(address: str, credentials: grpc.ChannelCredentials | None, options: Mapping[str, int | str]) -> aio.Channel:
    """The one place where grpcio opens a connection; a simulation puts its own in its place."""
    if credentials is None:
        return aio.insecure_channel(address, options=tuple(options.items()))
    return aio.secure_channel(address, credentials, options=tuple(options.items()))


def _expected(tls: TlsConfig) -> dict[str, str]:
    return {"grpc.ssl_target_name_override": tls.server_name} if tls.server_name else {}
