"""The settings of a client: how it connects, what it sends with each call, and how long it tries.

The options of gRPC channels that clients and processes share.
"""

import time
from typing import TYPE_CHECKING

from baton.connection import tracing
from baton.connection.credentials import PRIORITY_KEY, RECORDED, TENANT_KEY, Metadata, Tls, authorization, header
from baton.connection.retry import NO_RETRY, Resume, Retry
from baton.errors import BatonError, Unavailable

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

DEFAULT_ADDRESS = "127.0.0.1:7070"
# For every call but Generate, which takes as long as its answer.
CALL_SECONDS = 30.0
# For the end of an answer that its client has left.
STOP_SECONDS = 1.0
# gRPC's own longest, 27,000 hours: a longer one overflows, and is over at once.
_LONGEST_SECONDS = 97_200_000.0

_PACKAGE = "baton.inference.v1"


class Settings:
    """The arguments of a client, checked: `Client` and `AsyncClient` have them and their docstring from here."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        tls: Tls | None = None,
        token: str = "",
        tenant: str = "",
        retry: Retry | None = None,
        resume: Resume | None = None,
        tracer_provider: "TracerProvider | None" = None,
    ) -> None:
        """Prepares the connection to `host:port`; in plain text without `tls`.

        Args:
            address: The router, or a proxy before several; several routers are separated by commas, and calls go to
                the next one when one is lost.
            tls: Files to trust and to present; `Tls()` trusts public authorities.
            token: Sent as `authorization: Bearer TOKEN`, to other machines over TLS only.
            tenant: Whose quota the calls count for, if neither token nor certificate says so.
            retry: Makes calls again after errors that may pass; by default every error is raised at once.
            resume: Lets streamed answers go on, without a gap, when a connection or a router is lost; by default the
                error is raised.
            tracer_provider: OpenTelemetry's, for the spans of calls; by default the global one.

        Raises:
            ConfigError: A file cannot be read, or the token would leave this machine in plain text.
            InvalidRequest: Token or tenant have characters that gRPC cannot send.
        """
        self.address = address
        self.tls = tls
        self.retry = retry or NO_RETRY
        self.resume = resume
        self._tenant = tenant
        self.addresses = tuple(one.strip() for one in address.split(","))
        for one in self.addresses:
            carried = authorization(token, one, tls)
        self._metadata = (*carried, *header(TENANT_KEY, tenant))
        self._tracer_provider = tracer_provider

    def metadata(self, trace: tracing.CallTrace, priority: int = 0, *, is_recorded: bool = False) -> Metadata:
        """The metadata of a call."""
        wishes = (*header(PRIORITY_KEY, str(priority) if priority else ""), *(RECORDED if is_recorded else ()))
        return (*self._metadata, *wishes, *trace.metadata)

    @property
    def bare_metadata(self) -> Metadata:
        """The metadata of a call that belongs to no trace."""
        return self._metadata

    def begin(self, method: str) -> tracing.CallTrace:
        """The trace of a call of `Service/Method`."""
        return tracing.begin(f"{_PACKAGE}.{method}", self.addresses[0], self._tracer_provider)

    def attempts(self, timeout_seconds: float | None) -> "CallAttempts":
        """The attempts of one call, which end together after `timeout_seconds`, at most the longest time of gRPC."""
        seconds = timeout_seconds if timeout_seconds is None else min(timeout_seconds, _LONGEST_SECONDS)
        return CallAttempts(self.retry, seconds, len(self.addresses) - 1)

    def describe(self, kind: str) -> str:
        """A repr, without secrets."""
        parts = [kind, repr(self.address)]
        if self.tls is not None:
            parts.append("tls")
        if self._tenant:
            parts.append(f"tenant={self._tenant!r}")
        return f"<baton.{' '.join(parts)}>"


class CallAttempts:
    """Counts the attempts of one call, and knows how much of its time is left."""

    def __init__(self, retry: Retry, timeout_seconds: float | None, others: int = 0) -> None:
        self._retry = retry
        self._others = others  # routers that have not been tried yet
        self._count = 0
        self._ends_at = None if timeout_seconds is None else time.monotonic() + timeout_seconds

    @property
    def seconds_left(self) -> float | None:
        """For the next attempt; None without a timeout."""
        return None if self._ends_at is None else self._ends_at - time.monotonic()

    def pause_after(self, error: BatonError) -> float | None:
        """Seconds to wait before the next attempt; None if there is none and the error has to be raised."""
        if self._others and isinstance(error, Unavailable):
            self._others -= 1
            return 0.0
        self._count += 1
        return self._retry.pause_after(error, self._count, self.seconds_left)


# Larger than any limit of a router, so that its limits answer first, with an error that names the field.
MAX_RECEIVE_BYTES = 64 * 1024 * 1024

# A peer that is silent for 10 s gets a ping, and its connection ends if the ping is not answered within 10 s: our own
# server answers on its event loop, which may be held for seconds. Probes find a hung worker sooner. Without
# http2.ping_timeout_ms another timeout applies, of a minute. gRPC ignores unknown keys: tests hold these.
KEEPALIVE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *KEEPALIVE_OPTIONS,
    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
    # A peer that comes back is found within seconds; by default up to two minutes pass between attempts.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 3_000),
    # Peers are reached directly, whatever http_proxy says.
    ("grpc.enable_http_proxy", 0),
)
