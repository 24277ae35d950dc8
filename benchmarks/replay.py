"""Records requests on the embedded engine, runs each again from its record, and counts how many answers are equal.

    PYTHONPATH=.:tests .venv/bin/python benchmarks/replay.py [--requests 1000] [--from 0] [--at-once 8] [--seconds 200]

Two routers, one prefill and two decode workers with the demonstration model in float32, all in this process. Requests
are greedy, seeded, without a seed, guided, with stop strings, and with three answers; of each kind a third is moved to
another decode worker while it runs, and a third loses its stream and goes on at the other router. A replay is not
disturbed. After `--seconds` no more are begun. `--add-to FILE` collects the counts of several runs, each of which goes
on where the one before it ended.
"""

import argparse
import asyncio
import json
import math
import random
import time
from collections import Counter
from itertools import takewhile
from pathlib import Path
from typing import Any

from support.cluster.recorded import Recorded, demo_workers, recorded

from baton.inference.v1 import generate_pb2, record_pb2
from cli.commands.records.replay import first_differences, replay, report
from cli.commands.records.request import request_of
from router.config import RecordsConfig
from runtime.telemetry.logs import configure_logging

_NAME = {"type": "string", "maxLength": 40}
_SCHEMA = json.dumps(
    {"type": "object", "properties": {"name": _NAME, "age": {"type": "integer"}}, "required": ["name"]}
)
_WORDS = ("pear", "apple", "mango", "fox", "Mia", "lake", "river", "small", "red", "circle", "sort", "story", "a")
_WAYS = ("undisturbed", "moved", "resumed")


def _kinds(seed: int) -> dict[str, dict[str, Any]]:
    seeded = {"temperature": 0.9, "seed": seed}
    return {
        "greedy": {"sampling": {"temperature": 0.0}},
        "seeded": {"sampling": seeded},
        "drawn seed": {"sampling": {"temperature": 1.0}},
        "guided": {"sampling": seeded, "guided": {"json_schema": _SCHEMA}},
        "stop strings": {"sampling": seeded, "stopping": {"max_tokens": 48, "ignore_eos": True, "stop": ["qu", "zz"]}},
        "three answers": {"sampling": {**seeded, "n": 3}, "stopping": {"max_tokens": 48, "ignore_eos": True}},
    }


def _request(number: int) -> tuple[str, str, generate_pb2.GenerateRequest]:
    """The kind of a request, the way in which it is disturbed, and itself."""
    chosen = random.Random(number)
    kinds = _kinds(number)
    kind, way = list(kinds)[number % len(kinds)], _WAYS[number // len(kinds) % len(_WAYS)]
    prompt = " ".join(chosen.choices(_WORDS, k=chosen.randrange(4, 60)))
    fields = {"prompt": prompt, "stopping": {"max_tokens": 48, "ignore_eos": kind != "guided"}, **kinds[kind]}
    return kind, way, generate_pb2.GenerateRequest(request_id=f"request {number}", **fields)


async def _record(cluster: Recorded, way: str, request: generate_pb2.GenerateRequest) -> record_pb2.RequestRecord:
    match way:
        case "moved":
            return await cluster.run_moved(request, after=4)
        case "resumed":
            return await cluster.run_resumed(request, after=4)
    return await cluster.run(request)


async def _run(first: int, requests: int, at_once: int, seconds: float) -> Counter[str]:
    counts: Counter[str] = Counter()
    records = RecordsConfig(asked=True, prompts=True, max_bytes=256 * 2**20, tenant_bytes=256 * 2**20)
    ends_at = time.monotonic() + seconds
    numbers = takewhile(lambda _: time.monotonic() < ends_at, range(first, requests))

    async def work(cluster: Recorded) -> None:
        for number in numbers:
            kind, way, request = _request(number)
            record = await _record(cluster, way, request)
            # Not at once: the replay runs beside other requests than the original.
            replayed = await replay(cluster.clients[number % 2], request_of(record, None))
            differences = first_differences(record, replayed.ids)
            counts[f"{way}, {kind}"] += 1
            counts[f"equal: {way}, {kind}"] += not differences
            counts["tokens"] += sum(one.tokens for one in record.answers)
            counts["moved"] += record.finished.moves > 0
            counts["taken over"] += any(one.resumed_tokens for one in record.answers)
            counts["bytes"] += record.ByteSize()
            if differences:
                print("\n".join(report(record, replayed, differences)), flush=True)

    async with recorded(*demo_workers(), records=records) as cluster:
        await asyncio.gather(*(work(cluster) for _ in range(at_once)))
    return counts


def _names(counts: Counter[str]) -> list[str]:
    return [name for name in counts if ", " in name and not name.startswith("equal")]


def _show(counts: Counter[str]) -> None:
    names = _names(counts)
    print("| request | recorded | equal again |\n|---|---|---|")
    for name in sorted(names):
        print(f"| {name} | {counts[name]} | {counts[f'equal: {name}']} |")
    total, equal = sum(counts[name] for name in names), sum(counts[f"equal: {name}"] for name in names)
    print(f"| all | {total} | {equal} |")
    print(
        f"\n{counts['tokens']} tokens; {counts['moved']} requests were moved, {counts['taken over']} were taken over by"
    )
    print(f"the other router; {counts['bytes'] / max(1, total):.0f} bytes a record, with prompt and ids.")


def main() -> None:
    configure_logging("console", "error")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--add-to", type=Path)
    arguments = parser.parse_args()
    file = arguments.add_to
    counts: Counter[str] = Counter(json.loads(file.read_text()) if file and file.exists() else {})
    first = sum(counts[name] for name in _names(counts))
    counts += asyncio.run(_run(first, arguments.requests, arguments.at_once, arguments.seconds))
    if file:
        file.write_text(json.dumps(counts))
    _show(counts)


if __name__ == "__main__":
    main()
