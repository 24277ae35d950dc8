"""Routing policies side by side in simulated time: the policies and their indexes are real, the workers are not.

    python benchmarks/routing/simulation.py [--trace FILE] [--policies NAME ...] [--seeds N ...] [--output FILE]

Nothing here depends on the machine: a trace of seventeen minutes on sixteen workers takes seconds, and gives the same
numbers each time. benchmarks/routing/whole_system.py measures the whole system.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.routing.comparison import Plan, Result, compare, read_options, summary
from benchmarks.routing.simulated.clock import StepCosts, Time
from benchmarks.routing.simulated.prompts import answer_hashes, shortened
from benchmarks.routing.simulated.router import SimulatedRouter
from benchmarks.routing.simulated.worker import SimulatedWorker
from devtools.bench.traces import TracedRequest
from router.config import RoutingConfig
from router.routing.policies import load_policy
from router.routing.policy import Candidates, Placement, Policy, RoutingRequest, W
from router.routing.prefix.predicted import PredictedSeconds

POLICIES = ("least_loaded", "round_robin", "random", "greedy_seconds", "predicted_seconds")


class GreedySeconds(PredictedSeconds):
    """The obvious form of it, to compare with: the prefill worker with the least wait and computing time."""

    def choose(self, request: RoutingRequest, candidates: Candidates[W]) -> Placement[W]:
        apart = replace(candidates, requires_prefill=True)
        least = min(self.predictions(request, apart), key=lambda prediction: prediction.first_token)
        return super().choose(request, replace(apart, prefill=[least.runs_on]))


def simulate(name: str, seed: int, trace: Sequence[TracedRequest], plan: Plan) -> Result:
    """One policy on one trace."""
    clock = Time()
    costs = costs_of(trace, plan)
    workers = [
        SimulatedWorker(clock, costs, f"{role}-{index}", role)
        for role, number in (("prefill", plan.prefill), ("decode", plan.decode))
        for index in range(number)
    ]
    random.seed(seed)
    answered = answer_hashes(trace, plan.block_tokens, plan) if plan.cached_answers else {}
    routers = [
        SimulatedRouter(clock, plan, costs, policy_of(name, clock, seed), workers, answered)
        for _ in range(plan.routers)
    ]
    source, deciding = random.Random(seed), [0.0]

    def send(request: TracedRequest) -> None:
        started = time.thread_time()
        source.choice(routers).place(request)
        deciding[0] += time.thread_time() - started

    for request in trace:
        clock.later(request.at_seconds / plan.speedup, lambda each=request: send(each))  # type: ignore[misc]
    for router in routers:
        router.watch(trace[-1].at_seconds / plan.speedup)
    clock.run()
    answers = [answer for router in routers for answer in router.answers]
    assert len(answers) == len(trace)
    return summary(name, seed, answers, 0, plan, deciding[0] / len(trace) * 1e6)


def costs_of(trace: Sequence[TracedRequest], plan: Plan) -> StepCosts:
    """Prefill so fast that the prefill workers are `plan.load` busy without any cache."""
    unique = len({number for request in trace for number in request.hash_ids})
    tokens = sum(shortened(request, plan.block_tokens)[0] for request in trace)
    speed = tokens / (trace[-1].at_seconds / plan.speedup) / plan.prefill / plan.load
    room = max(int(unique * plan.cache_share), 2 * max(len(request.hash_ids) for request in trace))
    return StepCosts(speed, plan.block_tokens, room, step_seconds=plan.decode_step_seconds, kv_events=plan.kv_events)


def policy_of(name: str, clock: Time, seed: int) -> Policy:
    if name == "predicted_seconds":
        return PredictedSeconds(clock=clock, seed=seed)
    if name == "greedy_seconds":
        return GreedySeconds(clock=clock, seed=seed)
    return load_policy(RoutingConfig(policy=name))


async def _measure(name: str, seed: int, trace: Sequence[TracedRequest], plan: Plan) -> Result:
    return simulate(name, seed, trace, plan)


if __name__ == "__main__":
    asyncio.run(compare(_measure, read_options(__doc__, POLICIES)))
