"""The health of one worker: what it reports, what checks of it find, and whether its replies were wrong lately."""

import asyncio
import math
from collections.abc import Callable
from contextlib import aclosing

import structlog
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.calls import stream, unary
from baton.errors import BatonError
from discovery.backoff import Backoff
from router.config import ProbeConfig
from router.workers.watching.waiting_calls import WaitingCalls
from runtime.aio import sleep_together
from runtime.clock import monotonic

log = structlog.get_logger(__name__)

_NOT_CHECKED = "its health check has not answered yet"
_NOT_SERVING = "it reports that it is not serving"
_NO_CARD = "its model card has not been read yet"
# The times at which health checks may be due, of all workers together: an idle router sleeps in between.
_TIMES_AN_INTERVAL = 4
# How long a worker gets no requests whose replies were wrong, at first and at most; then how long that counts.
_FIRST_SUSPENSION_SECONDS, _LONGEST_SUSPENSION_SECONDS = 2.0, 60.0
_FORGIVEN_SECONDS = 300.0
_SERVING = health_pb2.HealthCheckResponse.SERVING


class WorkerHealth:
    """The health of a worker. Watch pushes changes, and repeated Checks detect a hung process.

    The calls that wait for it are in `calls`; `changed` is called when `problem` may have changed.
    """

    def __init__(self, channel: aio.Channel, calls: WaitingCalls, changed: Callable[[], None]) -> None:
        self._stub = health_pb2_grpc.HealthStub(channel)
        self._calls = calls
        self._changed = changed
        self._watch_problem = self._check_problem = _NOT_CHECKED
        self._card_problem = _NO_CARD
        self._fault_problem = ""
        self._suspensions = Backoff(_FIRST_SUSPENSION_SECONDS, _LONGEST_SUSPENSION_SECONDS)
        self._suspended_until = -math.inf
        self._heard_at = monotonic()
