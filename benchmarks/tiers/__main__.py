"""Prints tables of policies: see the package."""

import argparse
import statistics
import time as clock
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.routing.simulated.clock import Time
from benchmarks.tiers.cluster import INFINITE, POLICIES, WORKERS, Cluster, Policy
from benchmarks.tiers.traffic import Agents, Replay
from benchmarks.tiers.worker import Hardware
from devtools.bench.traces import TracedRequest, read_trace

_AGENT_SECONDS, _AGENT_WARM_SECONDS, _TRACE_WARM_SECONDS = 1200.0, 240.0, 120.0
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
    traffic.cluster = Cluster(time, policy, hardware, pool_blocks, _TRACE_WARM_SECONDS)
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
    yield f"\n{len(trace)} requests, {options.speedup:g} times as fast: {working_set} live blocks\n\n{_HEAD}"
    yield row(replay(INFINITE, _INFINITE_BLOCKS, hardware, trace, options.speedup))
    for share in options.pools:
        yield f"| **pool {share:.0%}** |"
        for policy in POLICIES:
            if (
                not policy.ends
                and not policy.knows_returns
                and (not options.policies or policy.name in options.policies)
            ):
                blocks = int(working_set * share / WORKERS)
                yield row(replay(policy, blocks, hardware, trace, options.speedup))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiers", description=__doc__)
    parser.add_argument("traffic", choices=("agents", "trace"))
    parser.add_argument("--trace", default="", metavar="FILE", help="in Mooncake's format, perhaps compressed by gzip")
    parser.add_argument("--speedup", type=float, default=2.0)
    parser.add_argument("--pools", type=float, nargs="+", default=[0.1, 0.25], metavar="SHARE")
    parser.add_argument("--policies", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=[3])
    parser.add_argument("--context-tokens", type=float, default=float("inf"), help="at which a token's work doubles")
    options = parser.parse_args()
    if options.traffic == "trace" and not options.trace:
        parser.error("trace: give a file with --trace")
    began, hardware = clock.monotonic(), Hardware(context_tokens=options.context_tokens)
    tables = agent_tables if options.traffic == "agents" else trace_tables
    for line in tables(options, hardware):
        print(line, flush=True)
    print(f"\n{clock.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
