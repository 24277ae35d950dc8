"""Kills one of two routers again and again under many streams: how many fail, differ, or are computed again?

    PYTHONPATH=.:tests .venv/bin/python benchmarks/lost_routers.py [--kills 500] [--at-once 200]

Starts a cluster of processes with simulated workers. Every stream is compared with an undisturbed one: its ids,
text, log probabilities' tokens and ends. Pauses are the longest gap of each stream that was resumed.
"""

import argparse
import asyncio
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from support.cluster.fleet import FleetPlan, fleet
from support.faults.lost_routers import Report, Streams
from support.servers.etcd import EtcdServer

from baton.inference.v1 import generate_pb2

_ENGINE = "engine={kind: simulated, name: demo, num_blocks: 65536, block_bytes: 1024, decode_step_seconds: 0.05}"
_ROUTER = ("probe={interval_seconds: 0.5, timeout_seconds: 3, hung_seconds: 6}", "drain_seconds=1")


def _requests() -> dict[str, generate_pb2.GenerateRequest]:
    seeded = {"temperature": 0.8, "seed": 11}
    stopping = {"max_tokens": 60, "ignore_eos": True}
    asked: dict[str, dict[str, object]] = {
        "greedy": {"sampling": {"temperature": 0.0}},
        "seeded": {"sampling": seeded},
        "stop": {"sampling": seeded, "stopping": {**stopping, "stop": ["qz", "th", "e e"]}},
        "three": {"sampling": {**seeded, "n": 3}},
        "logprobs": {"sampling": seeded, "response": {"logprobs": 2}},
    }
    return {
        name: generate_pb2.GenerateRequest(**{"prompt": "Sort: pear apple mango", "stopping": stopping, **fields})  # type: ignore[arg-type]
        for name, fields in asked.items()
    }


async def _run(kills: int, at_once: int, etcd: str, folder: Path) -> Report:
    plan = FleetPlan("lost-routers", etcd, (_ENGINE, "drain_seconds=1"), _ROUTER, prefill=1, decode=2, routers=2)
    async with fleet(plan, folder) as running:
        routers = [node for node in running.nodes.values() if node.role == "router"]
        streams = Streams([node.direct for node in routers], _requests(), Report())
        await streams.learn()

        async def lose() -> None:
            for number in range(kills):
                await asyncio.sleep(1.0)
                router = routers[number % 2]
                router.kill()
                streams.report.losses += 1
                router.start()
                await router.serving()

        await streams.run(at_once, lose)
        return streams.report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=200)
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        etcd, began = EtcdServer(Path(folder) / "etcd"), time.monotonic()
        etcd.start()
        try:
            report = asyncio.run(_run(arguments.kills, arguments.at_once, etcd.endpoint, Path(folder)))
        finally:
            etcd.stop()
    print(f"{report}; {time.monotonic() - began:.0f} s")
    for text in (report.failed + report.different)[:5]:
        print(text[:500])


if __name__ == "__main__":
    main()
