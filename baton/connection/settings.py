"""The settings of a client: how it connects, what it sends with each call, and how long it tries."""

import time
from typing import TYPE_CHECKING

from baton.connection import tracing
from baton.connection.credentials import Tls, authorization
from baton.connection.metadata import PRIORITY_KEY, TENANT_KEY, Metadata, header
from baton.connection.retry import NO_RETRY, Retry
from baton.errors import BatonError

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

DEFAULT_ADDRESS = "127.0.0.1:7070"
# For every call but Generate, which takes as long as its answer.
CALL_SECONDS = 30.0
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
        tracer_provider: "TracerProvider | None" = None,
    ) -> None:
        """Prepares the connection to `host:port`; in plain text without `tls`.

        Args:
            address: The router, or a proxy before several.
            tls: Files to trust and to present; `Tls()` trusts public authorities.
            token: Sent as `authorization: Bearer TOKEN`, to other machines over TLS only.
            tenant: Whose quota the calls count for, if neither token nor certificate says so.
            retry: Makes calls again after errors that may pass; by default every error is raised at once.
            tracer_provider: OpenTelemetry's, for the spans of calls; by default the global one.

        Raises:
            ConfigError: A file cannot be read, or the token would leave this machine in plain text.
            InvalidRequest: Token or tenant have characters that gRPC cannot send.
        """
        self.address = address
        self.tls = tls
        self.retry = retry or NO_RETRY
        self._tenant = tenant
        self._metadata = (*authorization(token, address, tls), *header(TENANT_KEY, tenant))
        self._tracer_provider = tracer_provider

    def metadata(self, trace: tracing.CallTrace, priority: int = 0) -> Metadata:
        """The metadata of a call."""
        return (*self._metadata, *header(PRIORITY_KEY, str(priority) if priority else ""), *trace.metadata)

    def begin(self, method: str) -> tracing.CallTrace:
        """The trace of a call of `Service/Method`."""
        return tracing.begin(f"{_PACKAGE}.{method}", self.address, self._tracer_provider)

    def attempts(self, timeout_seconds: float | None) -> "CallAttempts":
        """The attempts of one call, which end together after `timeout_seconds`, at most the longest time of gRPC."""
        seconds = timeout_seconds if timeout_seconds is None else min(timeout_seconds, _LONGEST_SECONDS)
        return CallAttempts(self.retry, seconds)

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

    def __init__(self, retry: Retry, timeout_seconds: float | None) -> None:
        self._retry = retry
        self._count = 0
        self._ends_at = None if timeout_seconds is None else time.monotonic() + timeout_seconds

    @property
    def seconds_left(self) -> float | None:
        """For the next attempt; None without a timeout."""
        return None if self._ends_at is None else self._ends_at - time.monotonic()

    def pause_after(self, error: BatonError) -> float | None:
        """Seconds to wait before the next attempt; None if there is none and the error has to be raised."""
        self._count += 1
        return self._retry.pause_after(error, self._count, self.seconds_left)
