"""The cost of a routing decision: CPU time from a prompt's ids to the chosen workers, and of what follows.

    python benchmarks/routing/decision.py [--tokens N] [--workers N] [--policies NAME ...]

One process without gRPC: the placer with its filters, the policy, its index with a full cache for each worker, and
requests whose prefix two of the workers have. *decision* is from the ids to the placement, *learning* what the policy
notes of the answer, *names* the hashes of the blocks that the decision did not need and that are computed when the
worker reports them. Each figure is the CPU time of this thread: the median of all calls and the least of them. Other
load on the machine makes the median larger, since it takes the caches and half of the core. The last line is a fixed
loop, to compare machines and their load.
"""

import argparse
import gc
import random
import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TypeVar

from baton.engine.v1 import prompt_pb2
from baton.inference.v1 import generate_pb2
from benchmarks.routing.simulated.clock import StepCosts, Time
from benchmarks.routing.simulated.router import View
from benchmarks.routing.simulated.worker import SimulatedWorker
from router.config import RoutingConfig
from router.placement.placer import Placer
from router.routing.policies import load_policy
from router.routing.policy import Placement, Policy, RoutingRequest
from router.routing.prefix.kv_index import block_keys
from router.routing.prefix.predicted import PredictedSeconds
from router.routing.prefix.prefix_caches import Cache
from router.routing.prefix.prompt_blocks import PromptHasher
from router.workers.handle import WorkerHandle

T = TypeVar("T")

BLOCK_TOKENS = 16
BLOCKS_OF_A_WORKER = 20_000
CALLS = 2000
# So many requests are placed before the workers of one report its blocks.
IN_FLIGHT = 8


def main() -> None:
    options = _options()
    source = random.Random(1)
    prompts = _prompts(source, options.tokens, options.shared)
    print(f"{options.tokens} tokens, {options.workers} workers, us of CPU, median (least)\n")
    print("| policy | decision | learning | names, later | all |")
    print("|---|---|---|---|---|")
    for name in options.policies:
        views = [
            View(SimulatedWorker(Time(), StepCosts(1e4, BLOCK_TOKENS, 1000), f"{role}-{index}", role))
            for role in ("prefill", "decode")
            for index in range(options.workers // 2)
        ]
        policy = load_policy(RoutingConfig(policy=name))
        if isinstance(policy, PredictedSeconds):
            _fill(policy, views, prompts, source)
        placer = Placer(_Cluster(views), RoutingConfig(), policy)  # type: ignore[arg-type]  # all that it needs of it
        costs = _measure(_Requests(placer, policy, prompts))
        print(f"| {name} | {' | '.join(map(str, costs))} |")
    loop = _measure(lambda _: [_cpu(lambda: sum(number for number in range(1000)))])
    print(f"\na loop of 1000 additions: {loop[0]} us")


@dataclass(frozen=True)
class _Model:
    """The part of a model that a placer reads."""

    block_tokens: int
    block_bytes: int


@dataclass(frozen=True)
class _Cluster:
    """The workers that a placer chooses from, which do not change."""

    workers: Sequence[View]
    version: int = 1

    def model(self, name: str) -> _Model:
        del name
        return _Model(BLOCK_TOKENS, 4096)


class _Requests:
    """RankCosts requests that run as predicted. The workers report each prompt when a few others have been placed."""

    def __init__(self, placer: Placer, policy: Policy, prompts: Sequence["array[int]"]) -> None:
        self._placer = placer
        self._policy = policy
        self._prompts = prompts
        self._unreported: deque[tuple[RoutingRequest, Placement[WorkerHandle]]] = deque()

    def __call__(self, index: int) -> list[float]:
        """The CPU time of each part, and of all."""
        request = _request(self._prompts[index].tolist())  # as a tokenizer has just returned it
        started = time.thread_time_ns()
        request = _result(self._placer.with_blocks(request))
        placement = self._placer.place(request)
        decided = time.thread_time_ns()
        placement.progress.first_token(placement.prediction.cached_tokens if placement.prediction else 0)
        placement.progress.accepted(())
        placement.progress.close()
        learnt = time.thread_time_ns()
        times = [(decided - started) / 1e3, (learnt - decided) / 1e3, _cpu(lambda: list(request.blocks.keys))]
        self._report_later(request, placement)
        return [*times, sum(times)]

    def _report_later(self, request: RoutingRequest, placement: Placement[WorkerHandle]) -> None:
        if isinstance(self._policy, PredictedSeconds):
            self._unreported.append((request, placement))
            if len(self._unreported) > IN_FLIGHT:
                request, placement = self._unreported.popleft()
                for worker in {placement.decode, placement.prefill or placement.decode}:
                    self._policy.caches.store(Cache(worker.record.process), list(request.blocks.keys))


@dataclass(frozen=True)
class _Cost:
    """Of one call, in microseconds."""

    median: float
    least: float

    def __str__(self) -> str:
        return f"{self.median:.0f} ({self.least:.0f})"


def _prompts(source: random.Random, tokens: int, shared: float) -> list["array[int]"]:
    """Prompts of which a share is one of twenty beginnings."""
    starts = [[source.randrange(100_000) for _ in range(int(tokens * shared))] for _ in range(20)]
    rest = tokens - len(starts[0])
    return [
        array("I", [*source.choice(starts), *(source.randrange(100_000) for _ in range(rest))]) for _ in range(CALLS)
    ]


def _request(tokens: Sequence[int]) -> RoutingRequest:
    prompt = prompt_pb2.Prompt(token_ids=tokens)
    return RoutingRequest("m", prompt, generate_pb2.RoutingOptions(), answer_tokens=100, token_ids=tokens)


def _fill(policy: PredictedSeconds, views: list[View], prompts: list["array[int]"], source: random.Random) -> None:
    """Every worker has a full cache, and the first half of each prompt is on two of them."""
    for view in views:
        names = [source.randbytes(8) for _ in range(BLOCKS_OF_A_WORKER)]
        policy.caches.replace(Cache(view.record.process), block_keys(names))
    for prompt in prompts:
        keys = PromptHasher().keys(prompt, BLOCK_TOKENS)
        for view in source.sample(views, 2):
            policy.caches.store(Cache(view.record.process), keys[: len(keys) // 2])


def _measure(call: Callable[[int], list[float]]) -> list[_Cost]:
    """The time of each of many different calls, by its parts."""
    gc.collect()
    gc.freeze()  # as a router does when it has started
    parts = zip(*(call(index) for index in range(CALLS)), strict=True)
    return [_Cost(statistics.median(times), min(times)) for times in parts]


def _cpu(call: Callable[[], object]) -> float:
    """The CPU time of a call, in microseconds."""
    started = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - started) / 1e3


def _result(coroutine: Coroutine[None, None, T]) -> T:
    """The result of a coroutine that does not wait."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("it waits")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--shared", type=float, default=0.5, help="of each prompt: the beginning of others, too")
    parser.add_argument("--policies", nargs="+", default=["least_loaded", "predicted_seconds"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
