"""The comparison of policies on a trace: the plan, the answers, their results, and the table of all.

simulation.py runs a plan in simulated time, whole_system.py with real processes.
"""

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.routing.shapes import SHAPES
from devtools.bench.report import Percentiles
from devtools.bench.traces import KINDS, TracedRequest, generate_trace, ideal_hit_rate, read_trace


@dataclass(frozen=True)
class Plan:
    """The plan of a run, the same for all policies. `block_tokens` stand for 512 tokens of a prompt."""

    prefill: int = 8
    decode: int = 8
    cache_share: float = 0.2
    load: float = 0.7
    block_tokens: int = 32
    speedup: float = 4.0
    routers: int = 1
    kv_events: bool = True
    decode_step_seconds: float = 0.02
    answer_scale: float = 0.0  # of the trace's lengths; 0 shortens answers as prompts
    cached_answers: bool = False  # workers that have decoded an answer have its blocks for the next turn

    def answer_tokens(self, traced: TracedRequest) -> int:
        """The length of an answer."""
        return max(1, int(traced.output_tokens * (self.answer_scale or self.block_tokens / 512)))


@dataclass(frozen=True)
class Answer:
    """The times of one request, and the worker of its prompt."""

    ttft: float
    seconds: float  # to the end
    tokens: int
    cached: int
    output: int
    worker_id: str
    is_local: bool  # on the decode worker
    predicted: float = 0.0  # TTFT

    @property
    def token_seconds(self) -> float:
        """The mean time from one token to the next; 0 for a single one."""
        return (self.seconds - self.ttft) / (self.output - 1) if self.output > 1 else 0.0


@dataclass(frozen=True)
class Result:
    """The result of one policy on one trace. Seconds are those of the run."""

    policy: str
    seed: int
    failed: int
    hit_rate: float
    p50: float
    p90: float
    p99: float
    token_p50: float
    token_p99: float
    whole: float  # the mean time to the end
    busiest: float  # tokens computed by the busiest prefill worker, over their mean
    busiest_of_all: float  # of all workers that computed prompts
    local_share: float
    prediction_error: float
    router_us: float


def summary(name: str, seed: int, answers: Sequence[Answer], failed: int, plan: Plan, router_us: float) -> Result:
    """The result of the answers. `router_us` is the router's CPU time for a request."""
    first = Percentiles.of([answer.ttft for answer in answers])
    token = Percentiles.of([answer.token_seconds for answer in answers if answer.output > 1])
    errors = [abs(answer.ttft - answer.predicted) / answer.ttft for answer in answers if answer.predicted]
    work: Counter[str] = Counter()
    apart: Counter[str] = Counter()
    for answer in answers:
        work[answer.worker_id] += answer.tokens - answer.cached
        if not answer.is_local:
            apart[answer.worker_id] += answer.tokens - answer.cached
    return Result(
        policy=name,
        seed=seed,
        failed=failed,
        hit_rate=sum(answer.cached for answer in answers) / sum(answer.tokens for answer in answers),
        p50=first.p50,
        p90=first.p90,
        p99=first.p99,
        token_p50=token.p50,
        token_p99=token.p99,
        whole=statistics.fmean(answer.seconds for answer in answers),
        busiest=max(apart.values(), default=0) * plan.prefill / max(1, apart.total()),
        busiest_of_all=max(work.values()) * len(work) / max(1, work.total()),
        local_share=sum(answer.is_local for answer in answers) / len(answers),
        prediction_error=statistics.median(errors) if errors else 0.0,
        router_us=router_us,
    )


def report(results: Sequence[Result], ideal: float) -> str:
    """A table, with the ratios to the first policy of the same seed."""
    lines = [
        "| policy | seed | hit rate | of ideal | TTFT p50 | p90 | p99 | to the first: p50 | p90 | p99"
        " | ITL p50, ms | p99 | whole answer, mean | busiest / mean | run on decode | prediction error"
        " | router us | failed |",
        "|" + "---|" * 18,
    ]
    first = {result.seed: result for result in reversed(results)}
    for each in results:
        base = first[each.seed]
        lines.append(
            f"| {each.policy} | {each.seed} | {each.hit_rate:.3f} | {each.hit_rate / ideal:.2f} | {each.p50:.3f} |"
            f" {each.p90:.2f} | {each.p99:.2f} | {each.p50 / base.p50:.2f} | {each.p90 / base.p90:.2f} |"
            f" {each.p99 / base.p99:.2f} | {each.token_p50 * 1e3:.1f} | {each.token_p99 * 1e3:.1f} |"
            f" {each.whole:.3f} | {each.busiest:.2f} | {each.local_share:.2f} | {each.prediction_error:.2f} |"
            f" {each.router_us:.0f} | {each.failed} |"
        )
    return "\n".join(lines)


Measure = Callable[[str, int, Sequence[TracedRequest], Plan], Awaitable[Result]]


async def compare(measure: Measure, options: argparse.Namespace) -> None:
    """Runs all policies on the trace of each seed, one after the other, and prints the table."""
    plan = Plan(
        options.prefill,
        options.decode,
        options.cache_share,
        options.load,
        options.block_tokens,
        options.speedup,
        options.routers,
        not options.without_events,
        options.decode_step_seconds,
        options.answer_scale,
        options.cached_answers,
    )
    results, ideal = [], 0.0
    for seed in options.seeds:
        trace = (
            read_trace(options.trace)[: options.requests]
            if options.trace
            else generate_trace(seed, options.requests, options.seconds, options.kind)
        )
        trace = SHAPES[options.shape](trace)
        ideal = ideal_hit_rate(trace)
        for policy in options.policies:
            results.append(await measure(policy, seed, trace, plan))
            print(json.dumps(asdict(results[-1])), flush=True)
    text = f"{plan}. Ideal hit rate {ideal:.3f}.\n\n{report(results, ideal)}"
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


def read_options(description: str, policies: Sequence[str]) -> argparse.Namespace:
    """The command line of either benchmark."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="in Mooncake's format; generated for each seed if left out")
    parser.add_argument("--kind", choices=KINDS, default="mixed", help="of a generated trace")
    parser.add_argument("--shape", choices=SHAPES, default="plain", help="prompts of twice the length; bursts")
    parser.add_argument("--policies", nargs="+", default=list(policies))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=600.0, help="in which the requests of a generated trace begin")
    parser.add_argument("--prefill", type=int, default=8)
    parser.add_argument("--decode", type=int, default=8)
    parser.add_argument("--cache-share", type=float, default=0.2, help="of the unique blocks, for each worker")
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--speedup", type=float, default=4.0)
    parser.add_argument("--block-tokens", type=int, default=32, help="for each 512 tokens of the trace")
    parser.add_argument("--decode-step-seconds", type=float, default=0.02)
    parser.add_argument("--answer-scale", type=float, default=0.0, help="of the trace's answers; 0 as the prompts")
    parser.add_argument("--routers", type=int, default=1, help="that know nothing of one another")
    parser.add_argument("--without-events", action="store_true")
    parser.add_argument("--cached-answers", action="store_true", help="in simulated time: they are cached, too")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()
