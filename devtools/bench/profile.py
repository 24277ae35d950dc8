"""Measures the profile of a cluster: time to first token by prompt length, time of a token by batch and context."""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.errors import EngineFailed
from devtools.bench.load import Load, Measured
from devtools.bench.workload import Lengths, Planned, Workload
from engine_protocol.timing_profile import DecodePoint, PrefillPoint, TimingProfile


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """The points to measure: each prompt length `repeats` times, each pair of batch and context once."""

    prompts: Sequence[int]
    batches: Sequence[int]
    contexts: Sequence[int]
    answer_tokens: int
    repeats: int
    seed: int

    @property
    def requests(self) -> int:
        """The number of requests that it sends."""
        return len(self.prompts) * self.repeats + 2 * sum(self.batches) * len(self.contexts)


class Profiler:
    """Measures one point after the other, on a cluster without other load."""

    def __init__(self, load: Load, plan: ProfilePlan, begun: Callable[[str, Sequence[Planned]], None]) -> None:
        self._load = load
        self._plan = plan
        self._begun = begun
        self._seeds = random.Random(plan.seed)

    async def measure(self, model: str) -> TimingProfile:
        """All points. Raises EngineFailed if no request of a point succeeds."""
        plan = self._plan
        prefill = [await self._first_token(tokens) for tokens in sorted(set(plan.prompts))]
        pairs = [(batch, context) for batch in sorted(set(plan.batches)) for context in sorted(set(plan.contexts))]
        decode = [await self._token(batch, context) for batch, context in pairs]
        return TimingProfile(model, tuple(prefill), tuple(decode))

    async def _first_token(self, tokens: int) -> PrefillPoint:
        name = f"prompts of {tokens}"
        answers = await self._run(name, self._prompts(self._plan.repeats, tokens, 1), 1)
        return PrefillPoint(tokens, statistics.median(answer.first_token_seconds for answer in answers))

    async def _token(self, batch: int, context: int) -> DecodePoint:
        """Sends the prompts twice: the second time they are cached, and do not hold up each other's tokens."""
        name, tokens = f"{batch} at once, context {context}", self._plan.answer_tokens
        # In the middle of the answers the context is as long as it should be.
        prompts = self._prompts(batch, max(1, context - tokens // 2), tokens)
        await self._run(name, [replace(each, output_tokens=1) for each in prompts], batch)
        answers = await self._run(name, prompts, batch)
        return DecodePoint(batch, context, statistics.median(answer.token_seconds for answer in answers))

    def _prompts(self, requests: int, tokens: int, output: int) -> list[Planned]:
        return Workload(Lengths(((tokens, output),))).all_at_once(requests, self._seeds.getrandbits(32))

    async def _run(self, name: str, planned: Sequence[Planned], concurrency: int) -> list[Measured]:
        self._begun(name, planned)
        answers = await self._load.closed_loop(planned, concurrency)
        good = [answer for answer in answers if not answer.error]
        if not good:
            raise EngineFailed(f"{name}: no request succeeded: {answers[0].error}")
        return good


def profile_table(profile: TimingProfile) -> str:
    """The points as Markdown, in milliseconds."""
    lines = ["# baton bench profile", "", "| prompt tokens | TTFT, ms |", "|---|---|"]
    lines += [f"| {point.tokens} | {point.seconds * 1e3:.2f} |" for point in profile.prefill]
    lines += ["", "| batch | context | a token, ms |", "|---|---|---|"]
    lines += [f"| {point.batch} | {point.context} | {point.seconds * 1e3:.2f} |" for point in profile.decode]
    return "\n".join(lines) + "\n"
