"""Limits on one peer of a server: the settings, token buckets that hold a connection to them, and the metrics."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import Counter, Gauge
from pydantic import BaseModel, ConfigDict, Field

from baton_http2.clock import monotonic
from baton_http2.input_budget import InputLimits
from baton_http2.wire.frames import ENHANCE_YOUR_CALM, ConnectionFailure

BUDGETS: Final = (
    "resets",
    "refused_streams",
    "empty_frames",
    "settings",
    "pings",
    "priorities",
    "window_updates",
    "header_lists",
    "continuations",
    "unread_output",
    "unread_input",
    "slow_request",
    "slow_reader",
    "connections",
    "handshake",
    "keepalive",
)

# Of all servers and clients of the process; the application registers them where it wants them.
CONNECTIONS = Gauge("baton_http2_connections", "Connections that are open now.", registry=None)
EXCEEDED = Counter(
    "baton_http2_budget_exceeded_total",
    "Connections and calls that were ended or refused because their peer went over a limit.",
    ["budget"],
    registry=None,
)
METRICS: Final = (CONNECTIONS, EXCEEDED)
for _budget in BUDGETS:
    EXCEEDED.labels(_budget)

# An answer of so many bytes earns its reader one more frame: an acknowledgement of each message and of each frame is
# within it, a window that is opened byte by byte is not.
BYTES_PER_FRAME: Final = 16
# An answer of so many bytes, about a token, earns its reader one more early cancel.
BYTES_PER_CANCEL: Final = 64

# Of all answers of a process that are not read yet.
UNREAD_OUTPUT_BYTES: Final = 256 * 2**20


class Rate(BaseModel):
    """A limit: the number that a peer may send at once, and the number that it may send more each second."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    burst: int = Field(ge=1)
    per_second: float = Field(ge=0)


class Http2Limits(BaseModel):
    """The limits of one connection: what it may send, and leave unread."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    resets: Rate = Field(
        default=Rate(burst=2000, per_second=1000),
        description="Calls cancelled early, of which answers earn more. Then the connection ends, or new calls are"
        " refused while others are answered. As many that the peer makes us reset.",
    )
    resets_multiple: float = Field(
        default=8.0, ge=1, description="At so many times that rate a connection ends though calls are answered on it."
    )
    premature_seconds: float = Field(
        default=1.0, ge=0, description="Sooner than this after its call, and before any answer, a cancel is early."
    )
    refused_streams: Rate = Field(
        default=Rate(burst=2000, per_second=1000),
        description="Calls over `max_streams`, which proxies begin before they know the limit, or after a drain.",
    )
    empty_frames: Rate = Field(default=Rate(burst=1000, per_second=100), description="Frames that carry nothing.")
    settings: Rate = Field(default=Rate(burst=50, per_second=5), description="SETTINGS.")
    pings: Rate = Field(default=Rate(burst=1000, per_second=100), description="PING; answers that are read earn more.")
    priorities: Rate = Field(default=Rate(burst=1000, per_second=100), description="PRIORITY.")
    window_updates: Rate = Field(
        default=Rate(burst=2000, per_second=1000), description="WINDOW_UPDATE; answers that are read earn more."
    )
    header_lists: Rate = Field(
        default=Rate(burst=10, per_second=5), description="Calls that were refused for too long a header list."
    )
    max_header_list_bytes: int = Field(default=16_384, ge=1024, description="Of one call, as RFC 9113 counts them.")
    max_continuations: int = Field(default=16, ge=0, description="CONTINUATION frames of one header block.")
    max_unread_output_bytes: int = Field(
        default=4 * 2**20, ge=65_536, description="Written and not taken by the peer; then calls wait to write more."
    )
    max_unread_input_bytes: int = Field(
        default=192 * 2**20, ge=65_536, description="Requests that are not read yet; above it, calls are refused."
    )
    max_connections_per_peer: int = Field(default=4096, ge=1, description="From one address.")
    handshake_seconds: float = Field(default=10.0, gt=0, description="For TLS, and again for HTTP/2's first frames.")
    slow_reader_seconds: float = Field(
        default=120.0, gt=0, description="Without taking any of what waits for it; then a call, or a connection, ends."
    )


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Everything that bounds the connections of one server. 0 is no limit of `max_age_seconds`.

    `input` is of requests; without it, what comes is not counted.
    """

    http2: Http2Limits
    max_message_bytes: int = 4 * 2**20
    max_streams: int = 4096
    max_age_seconds: float = 0.0
    accepts_compression: bool = True  # of requests
    keepalive_seconds: float = 10.0
    keepalive_timeout_seconds: float = 10.0
    min_ping_seconds: float = 5.0
    input: InputLimits | None = field(default_factory=InputLimits)
    unread_output_bytes: int = UNREAD_OUTPUT_BYTES  # of answers, on all connections of the process


class Bucket:
    """The rest of one budget of a connection. It costs a subtraction until its burst is used up.

    `earned` tells how much the connection has earned so far by what its peer has taken, where that counts. `left` is
    without what time and peer have added since it was last below 0.
    """

    __slots__ = ("_at", "_budget", "_burst", "_earned", "_earned_before", "_per_second", "left")

    def __init__(self, budget: str, rate: Rate, earned: Callable[[], float] | None = None) -> None:
        self._budget = budget
        self._burst = float(rate.burst)
        self.left = float(rate.burst)
        self._per_second = rate.per_second
        self._at = monotonic()
        self._earned = earned
        self._earned_before = 0.0

    def spend(self) -> None:
        """Takes one. Raises ConnectionFailure if there is none left."""
        self.left -= 1.0
        if self.left < 0:
            self._refill()
            if self.left < 0:
                raise exceeded(self._budget, f"too many {self._budget}")

    def owe(self) -> None:
        """Takes one, though there may be none left: `is_overdrawn` until time, or what is earned, has paid for it."""
        self.left = max(self.left - 1.0, -self._burst)

    @property
    def is_overdrawn(self) -> bool:
        """True if more was taken than there was."""
        if self.left < 0:
            self._refill()
        return self.left < 0

    def _refill(self) -> None:
        now = monotonic()
        more = (now - self._at) * self._per_second
        self._at = now
        if self._earned is not None:
            earned = self._earned()
            more += earned - self._earned_before
            self._earned_before = earned
        self.left = min(self._burst, self.left + more)


def exceeded(budget: str, reason: str) -> ConnectionFailure:
    """The failure of a connection that exceeded a limit. The code that answers it counts it."""
    return ConnectionFailure(ENHANCE_YOUR_CALM, reason, budget)
