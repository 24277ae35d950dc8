"""What a routing decision costs the router: CPU time for hashing the prompt, for the match, and for the whole decision.

    python benchmarks/routing/decision.py [--tokens N] [--workers N] [--policies NAME ...]

One process without gRPC: the placer with its filters, the policy, its index with a full cache for each worker, and
requests whose prefix two of the workers have. Each figure is the CPU time of this thread: the median of all calls and
the least of them. Other load on the machine makes the median larger, since it takes the caches and half of the core.
The last line is a fixed loop, to compare machines and their load.
"""

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from baton.engine.v1 import prompt_pb2
from baton.inference.v1 import generate_pb2
from benchmarks.routing.simulated.clock import StepCosts, Time
from benchmarks.routing.simulated.router import View
from benchmarks.routing.simulated.worker import SimulatedWorker
from router.config import RoutingConfig
from router.routing.placement import Placer
from router.routing.policies import load_policy
from router.routing.policy import PromptBlocks, RoutingRequest
from router.routing.prefix.kv_index import block_keys
from router.routing.prefix.predicted import PredictedSeconds
from router.routing.prefix.prefix_caches import Cache
from router.routing.prefix.prompt_blocks import PromptHasher

BLOCK_TOKENS = 16
BLOCKS_OF_A_WORKER = 20_000
CALLS = 2000


def main() -> None:
    options = _options()
    source = random.Random(1)
    prompts = _prompts(source, options.tokens, options.shared)
    views = [
        View(SimulatedWorker(Time(), StepCosts(1e4, BLOCK_TOKENS, 1000), f"{role}-{index}", role))
        for role in ("prefill", "decode")
        for index in range(options.workers // 2)
    ]
    requests = [_request(prompt) for prompt in prompts]
    hasher = PromptHasher()
    hashing = _measure(lambda index: hasher.keys(prompts[index], BLOCK_TOKENS))
    print(f"{options.tokens} tokens, {options.workers} workers, us of CPU, median (least)\n")
    print("| policy | hashing | match | filter, choose and the rest | all |")
    print("|---|---|---|---|---|")
    for name in options.policies:
        policy = load_policy(RoutingConfig(policy=name))
        match = NOTHING
        if isinstance(policy, PredictedSeconds):
            _fill(policy, views, requests, source)
            match = _measure(partial(_match, policy, requests))
        placer = Placer(_Cluster(views), RoutingConfig(), policy)  # type: ignore[arg-type]  # all that it needs of it
        whole = _measure(partial(_decide, placer, requests))
        hashed = hashing if match.median else NOTHING
        print(f"| {name} | {hashed} | {match} | {whole - match} | {hashed + whole} |")
    print(f"\na loop of 1000 additions: {_measure(lambda _: sum(number for number in range(1000)))} us")


@dataclass(frozen=True)
class _Cluster:
    """The workers that a placer chooses from."""

    workers: Sequence[View]


@dataclass(frozen=True)
class _Cost:
    """Of one call, in microseconds."""

    median: float
    least: float

    def __add__(self, other: "_Cost") -> "_Cost":
        return _Cost(self.median + other.median, self.least + other.least)

    def __sub__(self, other: "_Cost") -> "_Cost":
        return _Cost(self.median - other.median, self.least - other.least)

    def __str__(self) -> str:
        return f"{self.median:.0f} ({self.least:.0f})"


NOTHING = _Cost(0.0, 0.0)


def _prompts(source: random.Random, tokens: int, shared: float) -> list[tuple[int, ...]]:
    """Prompts of which a share is one of twenty beginnings."""
    starts = [[source.randrange(100_000) for _ in range(int(tokens * shared))] for _ in range(20)]
    rest = tokens - len(starts[0])
    return [(*source.choice(starts), *(source.randrange(100_000) for _ in range(rest))) for _ in range(CALLS)]


def _match(policy: PredictedSeconds, requests: Sequence[RoutingRequest], index: int) -> None:
    policy.caches.match(requests[index].blocks.keys)


def _decide(placer: Placer, requests: Sequence[RoutingRequest], index: int) -> None:
    """A request that runs as predicted."""
    placement = placer.place(requests[index])
    placement.progress.first_token(placement.prediction.cached_tokens if placement.prediction else 0)
    placement.progress.accepted(())
    placement.progress.close()


def _request(tokens: Sequence[int]) -> RoutingRequest:
    keys = PromptHasher().keys(tokens, BLOCK_TOKENS)
    return RoutingRequest(
        "m",
        prompt_pb2.Prompt(token_ids=tokens),
        generate_pb2.RoutingOptions(),
        answer_tokens=100,
        blocks=PromptBlocks(keys, BLOCK_TOKENS, 4096),
    )


def _fill(policy: PredictedSeconds, views: list[View], requests: list[RoutingRequest], source: random.Random) -> None:
    """Every worker has a full cache, and the first half of each prompt is on two of them."""
    for view in views:
        names = [source.randbytes(8) for _ in range(BLOCKS_OF_A_WORKER)]
        policy.caches.replace(Cache(view.record.process), block_keys(names))
    for request in requests:
        for view in source.sample(views, 2):
            policy.caches.store(Cache(view.record.process), request.blocks.keys[: len(request.blocks.keys) // 2])


def _measure(call: Callable[[int], object]) -> _Cost:
    """What each of many different calls takes."""
    times = []
    gc.collect()
    gc.freeze()  # as a router does when it has started
    for index in range(CALLS):
        started = time.thread_time_ns()
        call(index)
        times.append((time.thread_time_ns() - started) / 1e3)
    return _Cost(statistics.median(times), min(times))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--shared", type=float, default=0.5, help="of each prompt: the beginning of others, too")
    parser.add_argument("--policies", nargs="+", default=["least_loaded", "predicted_seconds"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
