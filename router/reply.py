"""The way back to a client: its messages, and at the end the ledger, also where there is no last message."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from baton.inference.v1 import timing_pb2

from router.ledger import Ledger
from router.outbox import Send
from router.stages import Stage
from rpc.metadata import LEDGER_KEY, remaining_seconds

# HTTP/2 peers drop trailers over 8 KiB, and a status may have 7 of them (rpc/status.py). In base64 this is under one.
_MOST_BYTES = 640


@dataclass(frozen=True, slots=True)
class Reply:
    """What is said to one client. `client_seconds` is how long it waits, if it says so."""

    send: Send
    client_seconds: float | None
    trail: Callable[[tuple[tuple[str, bytes], ...]], None]

    @contextmanager
    def ending_with(self, ledger: Ledger) -> Iterator[None]:
        """However it ends, the trailing metadata has the ledger."""
        try:
            yield
        finally:
            self.trail(((LEDGER_KEY, trailer(ledger.close())),))


def reply_to(context: Any, send: Send | None = None) -> Reply:
    """The reply to a call; its messages go to `send`, or into its stream."""
    return Reply(send or context.write, remaining_seconds(context), context.set_trailing_metadata)


def trailer(stages: tuple[Stage, ...]) -> bytes:
    """A Ledger, short enough to be sent: what took the least time becomes part of the last stage, the unattributed."""
    kept = list(stages)
    message = _ledger(kept)
    while message.ByteSize() > _MOST_BYTES:
        least = min(kept[:-1], key=lambda stage: stage.nanoseconds)
        kept.remove(least)
        kept[-1] = kept[-1].plus(least.nanoseconds, least.before_first_token)
        message = _ledger(kept)
    return message.SerializeToString()


def _ledger(stages: list[Stage]) -> timing_pb2.Ledger:
    return timing_pb2.Ledger(stages=[stage.message() for stage in stages])
