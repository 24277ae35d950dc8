"""Kills one of two routers again and again under many streams: how many fail, differ, or are computed again?

    PYTHONPATH=.:tests .venv/bin/python benchmarks/lost_routers.py [--kills 500] [--at-once 200] [--client events]
        [--how pause] [--stall-seconds 0.4]

Starts a cluster of processes with simulated workers. Every stream is compared with an undisturbed one: its ids,
text, log probabilities' tokens and ends. Pauses are the longest gap of each stream that was resumed. The client is
Baton's own, or one of server-sent events that sends `Last-Event-ID`; the router is killed, or paused for two seconds.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from support.cluster.fleet import FleetPlan, Node, fleet
from support.faults.lost_routers import EventSources, Report, Streams, request_kinds
from support.servers.etcd import EtcdServer

_ENGINE = "engine={kind: simulated, name: demo, num_blocks: 65536, block_bytes: 1024, decode_step_seconds: 0.05}"
_ROUTER = ("probe={interval_seconds: 0.5, timeout_seconds: 3, hung_seconds: 6}", "drain_seconds=1")


_BODIES: dict[str, tuple[str, dict[str, object]]] = {
    kind: (path, {"model": "demo", "max_tokens": 60, "ignore_eos": True, "temperature": 0.8, "seed": 11, **more})
    for kind, path, more in (
        ("chat", "/chat/completions", {"messages": [{"role": "user", "content": "Sort: pear apple mango"}]}),
        ("text", "/completions", {"prompt": "Sort: pear apple mango", "stop": ["qz", "th", "e e"]}),
        ("three", "/completions", {"prompt": "Sort: pear apple mango", "n": 3, "logprobs": 1}),
    )
}


@dataclass(frozen=True, slots=True)
class _Plan:
    kills: int
    at_once: int
    client: str
    how: str
    stall_seconds: float


async def _run(plan: _Plan, etcd: str, folder: Path) -> Report:
    is_of_events = plan.client == "events"
    workers = (_ENGINE, "drain_seconds=1")
    fleet_plan = FleetPlan("lost-routers", etcd, workers, _ROUTER, prefill=1, decode=2, routers=2, openai=is_of_events)
    async with fleet(fleet_plan, folder) as running:
        routers = [node for node in running.nodes.values() if node.role == "router"]
        streams: Streams | EventSources
        if is_of_events:
            streams = EventSources([node.openai for node in routers], _BODIES, plan.stall_seconds)
        else:
            requests = request_kinds("Sort: pear apple mango", 60)
            streams = Streams([node.direct for node in routers], requests, Report(), plan.stall_seconds)
        await streams.learn()
        await streams.run(plan.at_once, partial(_lose, plan, routers, streams.report))
        return streams.report


async def _lose(plan: _Plan, routers: Sequence[Node], report: Report) -> None:
    for number in range(plan.kills):
        await asyncio.sleep(1.0)
        router = routers[number % 2]
        report.losses += 1
        if plan.how == "pause":
            router.pause()
            await asyncio.sleep(2.0)
            router.resume()
        else:
            router.kill()
            router.start()
            await router.serving()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=200)
    parser.add_argument("--client", choices=("library", "events"), default="library")
    parser.add_argument("--how", choices=("kill", "pause"), default="kill")
    parser.add_argument("--stall-seconds", type=float, default=0.4, help="clients of events need more: 2")
    plan = _Plan(**vars(parser.parse_args()))
    with TemporaryDirectory() as folder:
        etcd, began = EtcdServer(Path(folder) / "etcd"), time.monotonic()
        etcd.start()
        try:
            report = asyncio.run(_run(plan, etcd.endpoint, Path(folder)))
        finally:
            etcd.stop()
    print(f"{report}; {time.monotonic() - began:.0f} s")
    for text in (report.failed + report.different)[:5]:
        print(text[:500])


if __name__ == "__main__":
    main()
