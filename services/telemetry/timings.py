"""The durations of a worker's stages: values, messages, and the clocks that measure them.

Time since a call's arrival that belongs to no other stage counts as queueing before the first engine step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from google.protobuf.duration_pb2 import Duration

from baton.inference.v1 import timing_pb2
from rpc.interceptors.calls import arrived_at
from runtime.clock import perf_counter
from services.engines.answer import Finished, FromTiers, Tokens


@dataclass(frozen=True, slots=True)
class Timing:
    """The duration of a stage on this worker.

    For transfers also the bytes moved, the transport's name, the bytes that were here already, and those of the bytes
    moved that came before the stage, while the prompt was computed.
    """

    stage: "timing_pb2.Stage.ValueType"
    seconds: float
    num_bytes: int = 0
    transport: str = ""
    cached_bytes: int = 0
    early_bytes: int = 0


def concurrent(timings: Sequence[Timing], seconds: float) -> Timing:
    """Returns one timing for transfers of the same stage that ran at the same time and together took `seconds`.

    Its transports are joined by commas, without repetition.
    """
    transports = ",".join(sorted({timing.transport for timing in timings}))
    return Timing(timings[0].stage, seconds, sum(timing.num_bytes for timing in timings), transports)


def stage_timings(timings: Sequence[Timing], worker_id: str) -> list[timing_pb2.StageTiming]:
    """Converts timings to messages that name this worker."""
    return [
        timing_pb2.StageTiming(
            stage=timing.stage,
            duration=duration(timing.seconds),
            worker_id=worker_id,
            num_bytes=timing.num_bytes,
            transport=timing.transport,
            cached_bytes=timing.cached_bytes,
        )
        for timing in timings
    ]


def as_seconds(message: Duration) -> float:
    """Converts a duration to seconds."""
    return message.ToNanoseconds() / 1e9


def duration(seconds: float) -> Duration:
    """Converts seconds to a duration, to the nanosecond."""
    message = Duration()
    message.FromNanoseconds(int(seconds * 1e9))
    return message


class CallClock:
    """Times one call on the monotonic clock. The code that runs a stage adds its timing."""

    def __init__(self) -> None:
        self._began = arrived_at()
        self.timings: list[Timing] = []
        self._peer = FromTiers()

    def add(self, timings: Sequence[Timing]) -> None:
        """Adds finished stages."""
        self.timings += timings

    def borrowed(self, timing: Timing, num_tokens: int, *, peer_has_none: bool) -> None:
        """Adds an attempt to borrow the beginning of the prompt, which has brought so many tokens."""
        self.timings.append(timing)
        self._peer = FromTiers(peer=num_tokens, peer_seconds=timing.seconds, peer_has_none=peer_has_none)

    def origins(self, below: FromTiers, cached_tokens: int) -> FromTiers:
        """The places of the prompt's cached tokens: below the pool, as the engine says, and at a peer."""
        peer = min(self._peer.peer, max(0, cached_tokens - below.host - below.disk))
        return replace(self._peer, host=below.host, disk=below.disk, peer=peer)

    def waited_until(self, moment: float) -> float:
        """Returns the seconds until `moment`, of time.perf_counter, that belong to no finished stage."""
        return max(0.0, moment - self._began - sum(timing.seconds for timing in self.timings))

    def prefilled(self, asked: float, queue_seconds: float) -> tuple[Timing, ...]:
        """Returns all stages of a prefill that has just ended.

        The engine was called at `asked`, and the prompt waited `queue_seconds` inside it.
        """
        ended = perf_counter()
        waiting = Timing(timing_pb2.STAGE_PREFILL_QUEUE, self.waited_until(asked) + queue_seconds)
        computing = Timing(timing_pb2.STAGE_PREFILL_COMPUTE, max(0.0, ended - asked - queue_seconds))
        self.add([waiting, computing])
        return tuple(self.timings)


class DecodeClock:
    """Times one decode from the call of the engine. With `is_pulled` there is no prompt to compute.

    The engine's own times separate queue, prompt and steps, since the reader of the tokens may be slow. Time until the
    first token belongs to the prompt, if there is one.
    """

    def __init__(self, call: CallClock, *, is_pulled: bool) -> None:
        self.asked = perf_counter()
        self.first_at: float | None = None
        self.is_pulled = is_pulled
        self._call = call
        self._waited = call.waited_until(self.asked)
        self.began = self.asked - self._waited  # start of the queue stage
        self._fault_seconds = 0.0

    def observe(self, event: Tokens | Finished, num_tokens: int) -> Tokens | Finished:
        """Notes an event of the engine after so many ids; returns it, Finished as `completed` does."""
        if isinstance(event, Finished):
            return self.completed(event, num_tokens)
        self.record_tokens()
        return event

    def record_tokens(self) -> None:
        """Notes that tokens have come."""
        self.first_at = self.first_at or perf_counter()

    def add_fault(self, seconds: float) -> None:
        """Adds the delay of an injected fault to the decode steps."""
        self._fault_seconds += seconds

    def completed(self, engine: Finished, num_tokens: int) -> Finished:
        """The engine's end with this worker's times of the stages, and its count of the answer's ids."""
        prompt_seconds = 0.0
        if not self.is_pulled and self.first_at is not None:
            prompt_seconds = max(0.0, self.first_at - self.asked - engine.queue_seconds)
        steps_seconds = max(0.0, engine.prefill_seconds + engine.decode_seconds - prompt_seconds)
        return replace(
            engine,
            queue_seconds=self._waited + engine.queue_seconds,
            prefill_seconds=prompt_seconds,
            decode_seconds=steps_seconds + self._fault_seconds,
            from_tiers=self._call.origins(engine.from_tiers, engine.cached_tokens),
            num_tokens=num_tokens,
        )
