"""Options of a client's reply beside its tokens: their pace, and the timings at the end."""

from dataclasses import dataclass

from baton.connection.credentials import TIMINGS_KEY
from baton.inference.v1 import generate_pb2
from baton_http2.server.reply import Reply
from router.telemetry.stages import StageTiming, timings_message
from router.telemetry.timings import Timings

_DEFAULT_DELAY_SECONDS = 0.2  # of tokens that wait for others
# HTTP/2 peers drop trailers over 8 KiB, and a status may have 7 of them (rpc/status.py). In base64 this is under one.
_MAX_TRAILER_BYTES = 640


def end_reply(reply: Reply, timings: Timings) -> None:
    """Puts the timings into the trailing metadata, at the end of the request, also if it fails."""
    trailer = timings.message().SerializeToString()
    if len(trailer) > _MAX_TRAILER_BYTES:
        trailer = timings_trailer(timings.close())
    reply.set_trailing_metadata(((TIMINGS_KEY, trailer),))


def timings_trailer(stages: tuple[StageTiming, ...]) -> bytes:
    """A serialized Timings of bounded size. The shortest stages are added to the last one, the unattributed."""
    kept = list(stages)
    message = timings_message(kept)
    while message.ByteSize() > _MAX_TRAILER_BYTES:
        least = min(kept[:-1], key=lambda stage: stage.nanoseconds)
        kept.remove(least)
        kept[-1] = kept[-1].plus(least.nanoseconds, least.before_first_token)
        message = timings_message(kept)
    return message.SerializeToString()


@dataclass(frozen=True, slots=True)
class Pace:
    """The pace of messages: the first token is sent at once, later ones `min_tokens` together.

    Fewer are sent when `max_delay_seconds` have passed since the first of them, and at the end.
    """

    min_tokens: int = 1
    max_delay_seconds: float = 0.0

    @classmethod
    def of(cls, response: generate_pb2.ResponseOptions) -> "Pace":
        """The pace that a request asks for."""
        if response.min_tokens_per_message <= 1:
            return AT_ONCE
        delay = response.max_delay
        seconds = delay.seconds + delay.nanos / 1e9 if response.HasField("max_delay") else _DEFAULT_DELAY_SECONDS
        return cls(response.min_tokens_per_message, seconds)


AT_ONCE = Pace()
