"""What a worker's stages take, from a call's arrival on: whatever is no other stage is the wait for the first step."""

import time
from collections.abc import Sequence
from dataclasses import replace

from baton.inference.v1 import timing_pb2

from rpc.arrival import arrived_at
from services.answer import Finished, Tokens
from services.handoffs import Timing


class CallClock:
    """Times one call. Stages that are over are added by whoever ran them; all are of the monotonic clock."""

    def __init__(self) -> None:
        self._began = arrived_at()
        self.timings: list[Timing] = []

    def add(self, timings: Sequence[Timing]) -> None:
        """Notes stages that are over."""
        self.timings += timings

    def waited_until(self, moment: float) -> float:
        """What has passed until then, of time.perf_counter, and was none of the stages."""
        return max(0.0, moment - self._began - sum(timing.seconds for timing in self.timings))

    def prefilled(self, asked: float, queue_seconds: float) -> tuple[Timing, ...]:
        """The prompt is computed and held: all stages. The engine was asked then, and had it wait so long."""
        ended = time.perf_counter()
        waiting = Timing(timing_pb2.STAGE_PREFILL_QUEUE, self.waited_until(asked) + queue_seconds)
        computing = Timing(timing_pb2.STAGE_PREFILL_COMPUTE, max(0.0, ended - asked - queue_seconds))
        self.add([waiting, computing])
        return tuple(self.timings)


class DecodeClock:
    """Times one decode from the moment when the engine is asked for it. `is_pulled` says that it has no prompt to run.

    The engine's own times tell queue, prompt and steps apart: the reader of the tokens may be slow. What passes until
    the first of them is here belongs to the prompt, where there is one.
    """

    def __init__(self, call: CallClock, *, is_pulled: bool) -> None:
        self.asked = time.perf_counter()
        self.first_at: float | None = None
        self.is_pulled = is_pulled
        self._waited = call.waited_until(self.asked)
        self.began = self.asked - self._waited  # and nothing but waiting since then, as it were
        self._struck_seconds = 0.0

    def saw(self, event: Tokens | Finished) -> Tokens | Finished:
        """What came from the engine, its last word with what the stages took on this worker."""
        if isinstance(event, Finished):
            return self._completed(event)
        self.first_at = self.first_at or time.perf_counter()
        return event

    def struck(self, seconds: float) -> None:
        """A planned fault held up the steps for so long."""
        self._struck_seconds += seconds

    def _completed(self, engine: Finished) -> Finished:
        prompt_seconds = 0.0
        if not self.is_pulled and self.first_at is not None:
            prompt_seconds = max(0.0, self.first_at - self.asked - engine.queue_seconds)
        steps_seconds = max(0.0, engine.prefill_seconds + engine.decode_seconds - prompt_seconds)
        return replace(
            engine,
            queue_seconds=self._waited + engine.queue_seconds,
            prefill_seconds=prompt_seconds,
            decode_seconds=steps_seconds + self._struck_seconds,
        )
