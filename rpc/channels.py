"""Channels to peers, with the settings that every connection of the system shares."""

from collections.abc import Callable, Mapping

import grpc
from grpc import aio

from rpc.tls import TlsConfig
from rpc.tracing.channel import TracedChannel

# Larger than any limit of ours, so that our limits answer first, with an error that names the field.
MAX_RECEIVE_BYTES = 64 * 1024 * 1024

# A peer that answers nothing for 10 s is asked, and is gone if it stays silent for 3 s. Without http2.ping_timeout_ms
# the answer is waited for by another clock, of a minute. gRPC ignores a key it does not know: tests hold these.
KEEPALIVE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *KEEPALIVE_OPTIONS,
    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
    # A peer that comes back is found within seconds; by default up to two minutes pass between attempts.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 3_000),
    # Workers are reached directly, whatever http_proxy says.
    ("grpc.enable_http_proxy", 0),
)


def open_channel(
    address: str, tls: TlsConfig | None = None, *, replaced_options: Mapping[str, int] | None = None
) -> aio.Channel:
    """A channel to `host:port`: `async with open_channel(address) as channel: ...`. Connects when first used.

    With `tls` the peer must present a certificate of its `ca`; with its `cert` and `key` we present ours. Raises
    ConfigError if these files cannot be read. `replaced_options` are for a peer that is not ours and wants others.
    Calls made within a span carry its context.
    """
    options: dict[str, int | str] = {**dict(_CHANNEL_OPTIONS), **(replaced_options or {})}
    if tls is None:
        return _open(address, None, options)
    return _open(address, tls.channel_credentials(), {**options, **_expected(tls)})


# Opens channels that all have the same credentials.
Dial = Callable[[str], aio.Channel]


def dialer(tls: TlsConfig | None) -> Dial:
    """`open_channel` with the files read now, once: later ones cannot fail. Raises ConfigError."""
    credentials = None if tls is None else tls.channel_credentials()
    options: dict[str, int | str] = {**dict(_CHANNEL_OPTIONS), **(_expected(tls) if tls else {})}
    return lambda address: _open(address, credentials, options)


def _open(address: str, credentials: grpc.ChannelCredentials | None, options: Mapping[str, int | str]) -> aio.Channel:
    if credentials is None:
        return TracedChannel(aio.insecure_channel(address, options=tuple(options.items())))
    return TracedChannel(aio.secure_channel(address, credentials, options=tuple(options.items())))


def _expected(tls: TlsConfig) -> dict[str, str]:
    return {"grpc.ssl_target_name_override": tls.server_name} if tls.server_name else {}
