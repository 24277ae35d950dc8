"""Prints tables of policies: see the package."""

import argparse
import statistics
import time as clock
from collections.abc import Iterator, Sequence
from pathlib import Path

from baton.errors import ConfigError
from benchmarks.routing.simulated.clock import Time
from benchmarks.tiers.cluster import INFINITE, POLICIES, WORKERS, Cluster, Policy
from benchmarks.tiers.traffic import Agents, Replay
from benchmarks.tiers.worker import Hardware
from cli.arguments.values import positive
from devtools.bench.traces import TracedRequest, read_trace

_AGENT_SECONDS, _AGENT_WARM_SECONDS = 1200.0, 240.0
# Of a trace, the least of both is its warm-up.
_TRACE_WARM_SECONDS, _TRACE_WARM_SHARE = 120.0, 0.2
_INFINITE_BLOCKS = 10**6
_HEAD = (
    "| policy | follow-ups | hit | device/host/disk/peer | p50 | p90 | p99 s | unread | prefill % | refused |\n"
    + "|---" * 10
    + "|"
)


def agents(policy: Policy, pool_blocks: int, hardware: Hardware, seed: int) -> Cluster:
    """Runs 100 agents and 60 chats."""
    time = Time()
    traffic = Agents(time, seed, 100, 60, _AGENT_SECONDS)
    cluster = Cluster(time, policy, hardware, pool_blocks, _AGENT_WARM_SECONDS)
    traffic.cluster = cluster
    time.run()
    cluster.live_blocks = traffic.live_blocks
    return cluster


def replay(
    policy: Policy, pool_blocks: int, hardware: Hardware, trace: Sequence[TracedRequest], speedup: float
) -> Cluster:
    """Runs a trace."""
    time = Time()
    traffic = Replay(time, trace, speedup)
    warm_seconds = min(_TRACE_WARM_SECONDS, _TRACE_WARM_SHARE * trace[-1].at_seconds / speedup)
    traffic.cluster = Cluster(time, policy, hardware, pool_blocks, warm_seconds)
    time.run()
    return traffic.cluster


def row(cluster: Cluster) -> str:
    """A line of a table."""
    measured = cluster.measured
    shares = "/".join(
        f"{measured.found[tier] / max(1, measured.prompts):.2f}" for tier in ("device", "host", "disk", "peer")
    )
    times = " | ".join(f"{measured.quantile(share):.2f}" for share in (0.5, 0.9, 0.99))
    return (
        f"| {cluster.policy.name} | {len(measured.first_tokens)} | {measured.hit:.3f} | {shares} | {times} "
        f"| {cluster.unread:.2f} | {100 * cluster.busy:.0f} | {cluster.refused} |"
    )


def agent_tables(options: argparse.Namespace, hardware: Hardware) -> Iterator[str]:
    for seed in options.seeds:
        infinite = agents(INFINITE, _INFINITE_BLOCKS, hardware, seed)
        working_set = statistics.median_low(infinite.live_blocks)
        yield f"\nAgents, seed {seed}: a working set of {working_set} blocks\n\n{_HEAD}"
        yield row(infinite)
        for share in options.pools:
            yield f"| **pool {share:.0%}** |"
            for policy in POLICIES:
                if not options.policies or policy.name in options.policies:
                    yield row(agents(policy, int(working_set * share / WORKERS), hardware, seed))


def trace_tables(options: argparse.Namespace, hardware: Hardware) -> Iterator[str]:
    trace = read_trace(Path(options.trace))
    working_set = Replay(Time(), trace, options.speedup).live_blocks
    if not working_set:
        raise ConfigError(f"{options.trace}: no block is used at two times, so there is nothing to cache")
    policies = [each for each in POLICIES if _can_run(each, trace)]
    infinite = _INFINITE_BLOCKS + len({block for request in trace for block in request.hash_ids})
    yield f"\n{len(trace)} requests, {options.speedup:g} times as fast: {working_set} live blocks\n\n{_HEAD}"
    yield row(replay(INFINITE, infinite, hardware, trace, options.speedup))
    for share in options.pools:
        yield f"| **pool {share:.0%}** |"
        for policy in policies:
            if not options.policies or policy.name in options.policies:
                yield row(replay(policy, int(working_set * share / WORKERS), hardware, trace, options.speedup))


def _can_run(policy: Policy, trace: Sequence[TracedRequest]) -> bool:
    """True if a trace says what a policy must know: when sessions end, and to whom requests belong."""
    has_ends = any(request.ends_session for request in trace)
    if policy.knows_returns:
        return all(request.session_id for request in trace)
    return has_ends or not policy.ends


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiers", description=__doc__)
    parser.add_argument("traffic", choices=("agents", "trace"))
    parser.add_argument(
        "--trace", default="", metavar="FILE", help="in Mooncake's format, perhaps with sessions, perhaps .gz"
    )
    parser.add_argument("--speedup", type=positive, default=2.0, metavar="X", help="times as fast")
    parser.add_argument("--pools", type=positive, nargs="+", default=[0.1, 0.25], metavar="SHARE")
    names = [policy.name for policy in POLICIES]
    parser.add_argument("--policies", nargs="+", default=[], choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--seeds", type=int, nargs="+", default=[3])
    parser.add_argument("--context-tokens", type=positive, default=float("inf"), help="at which a token's work doubles")
    options = parser.parse_args()
    if options.traffic == "trace" and not options.trace:
        parser.error("trace: give a file with --trace")
    began, hardware = clock.monotonic(), Hardware(context_tokens=options.context_tokens)
    tables = agent_tables if options.traffic == "agents" else trace_tables
    try:
        for line in tables(options, hardware):
            print(line, flush=True)
    except ConfigError as error:
        parser.exit(2, f"{error}\n")
    print(f"\n{clock.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
