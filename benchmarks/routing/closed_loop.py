"""A prefill and a decode worker under a closed loop, in simulated time: what `predicted_seconds` makes of it.

    python benchmarks/routing/closed_loop.py

So many requests run at once, each prompt is new, and the next one comes when an answer has ended. Engines compute
several prompts in one step. The costs are about those of an 8B model on H100 GPUs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.routing.comparison import Answer, Plan
from benchmarks.routing.simulated.clock import StepCosts, Time
from benchmarks.routing.simulated.router import SimulatedRouter
from benchmarks.routing.simulated.worker import SimulatedWorker
from devtools.bench.report import Percentiles
from devtools.bench.traces import BLOCK_TOKENS, TracedRequest
from router.routing.policy import Candidates, Placement, RoutingRequest, W
from router.routing.prefix.predicted import PredictedSeconds

Topology = Literal["apart", "whole", "automatic"]

H100 = StepCosts(
    tokens_per_second=40_000.0,
    block_tokens=64,
    num_blocks=1_700,
    chunk_blocks=128,
    step_seconds=0.008,
    move_seconds=0.002,
    bytes_per_second=13e9,
    block_bytes=8 << 20,
)
ANSWER_TOKENS = 128
_LOADS = ((1, 1024), (16, 1024), (64, 1024), (16, 4000), (64, 4000), (64, 200))


class Forced(PredictedSeconds):
    """predicted_seconds among the pairs, among the decode workers alone, or among all; it learns from each."""

    topology: Topology = "automatic"

    def choose(self, request: RoutingRequest, candidates: Candidates[W]) -> Placement[W]:
        match self.topology:
            case "apart":
                candidates = replace(candidates, requires_prefill=True)
            case "whole":
                candidates = replace(candidates, prefill=())
        return super().choose(request, candidates)


@dataclass(frozen=True)
class Throughput:
    """The answers to the requests of one phase, and the time that they took."""

    answers: Sequence[Answer]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(each.output for each in self.answers) / self.seconds

    @property
    def handed_over(self) -> int:
        return sum(not each.is_local for each in self.answers)


class ClosedLoop:
    """A router and two workers. What the router has learnt in one phase stays for the next."""

    def __init__(self, costs: StepCosts = H100) -> None:
        self._time, self._numbers = Time(), 0
        workers = [SimulatedWorker(self._time, costs, f"{role}-0", role) for role in ("prefill", "decode")]
        self._policy = Forced(clock=self._time, seed=1)
        self._block_tokens = costs.block_tokens
        plan = Plan(block_tokens=BLOCK_TOKENS, answer_scale=1.0)
        self._router = SimulatedRouter(self._time, plan, costs, self._policy, workers)

    def run(self, topology: Topology, at_once: int, prompt_tokens: int, requests: int) -> Throughput:
        """Runs so many requests, and waits until all have ended."""
        self._policy.topology = topology
        first, left, began = len(self._router.answers), requests - at_once, self._time.now

        def answered() -> None:
            nonlocal left
            if left > 0:
                left -= 1
                self._send(prompt_tokens)

        self._router.answered = answered
        for _ in range(at_once):
            self._send(prompt_tokens)
        self._router.watch(began)
        self._time.run()
        return Throughput(self._router.answers[first:], self._time.now - began)

    def _send(self, prompt_tokens: int) -> None:
        count = -(-prompt_tokens // self._block_tokens)
        self._numbers += count
        # A trace's prompts have blocks of their own size, which are shortened to those of the workers.
        tokens = (count - 1) * BLOCK_TOKENS + (prompt_tokens - (count - 1) * self._block_tokens) * (
            BLOCK_TOKENS // self._block_tokens
        )
        blocks = tuple(range(self._numbers, self._numbers + count))
        self._router.place(TracedRequest(self._time.now, blocks, tokens, ANSWER_TOKENS))


def main() -> None:
    print("| at once x prompt | topology | tokens/s | handed over | TTFT p50, ms | ms a token, p50 |")
    print("|---|---|---|---|---|---|")
    phases: Sequence[tuple[Topology, ...]] = (("apart",), ("whole",), ("automatic",), ("whole", "automatic"))
    for at_once, tokens in _LOADS:
        for topologies in phases:
            loop = ClosedLoop()
            found = [loop.run(topology, at_once, tokens, 320) for topology in topologies][-1]
            first = Percentiles.of([each.ttft * 1e3 for each in found.answers]).p50
            each_token = Percentiles.of([each.token_seconds * 1e3 for each in found.answers]).p50
            name = ", then ".join(topologies)
            cells = f"{found.tokens_per_second:.0f} | {found.handed_over} | {first:.0f} | {each_token:.1f}"
            print(f"| {at_once} x {tokens} | {name} | {cells} |")


if __name__ == "__main__":
    main()
