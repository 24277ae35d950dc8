"""Loses one of two routers again and again under many streams: how many fail, differ, or are computed again?

    PYTHONPATH=.:tests .venv/bin/python benchmarks/lost_routers.py [--losses 500] [--seconds 200] [--streams 200]
        [--how kill pause cut restart] [--client library|events] [--engine simulated|embedded] [--add-to FILE]

Starts a cluster of processes. Every stream is compared with an undisturbed one: its ids, text, log probabilities'
tokens, calls and ends. Pauses are those from the loss of a router to the next token: of each stream that was resumed,
the longest. The client is Baton's own, or one of server-sent events that sends `Last-Event-ID`; of several ways of
losing a router each is taken in turn. A killed router starts a second later, forked from a process that has imported
it: an import takes a core for a second or two. Routers call workers directly: proxies would run in the clients'
process. With `--add-to`, the figures are added to those in a file, whose sum is printed, so that a long run can be made
in pieces.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from support.cluster.fleet import FleetPlan, Node, fleet
from support.faults.kept_requests import BODIES, any_requests, embedded_requests, embedded_worker
from support.faults.lost_routers import EventSources, Report, Streams
from support.servers.etcd import EtcdServer

from runtime.garbage import collect_rarely, exempt_living_objects

_SIMULATED = "engine={kind: simulated, name: demo, num_blocks: 65536, block_bytes: 1024, decode_step_seconds: 0.05}"
_ROUTER = ("probe={interval_seconds: 0.5, timeout_seconds: 3, hung_seconds: 6}", "drain_seconds=1")
_WORKER = ("handoff.lease_seconds=5", "drain_seconds=1")
_MAX_TOKENS = 120
_PAUSE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class _Plan:
    losses: int
    seconds: float
    streams: int
    programs: int
    client: str
    engine: str
    how: Sequence[str]
    apart_seconds: float
    add_to: Path | None

    @property
    def name(self) -> str:
        """The figures that may be added up."""
        return f"{'+'.join(self.how)}, {self.client}, {self.engine}, {self.streams} streams"


async def _run(plan: _Plan, etcd: str, folder: Path) -> Report:
    is_embedded = plan.engine == "embedded"
    worker = (*(embedded_worker(folder) if is_embedded else [_SIMULATED]), *_WORKER)
    fleet_plan = FleetPlan(
        "lost-routers",
        etcd,
        worker,
        _ROUTER,
        encode=int(is_embedded),
        prefill=1,
        decode=2,
        routers=2,
        proxied=False,
        openai=plan.client == "events",
    )
    async with fleet(fleet_plan, folder) as running:
        routers = [node for node in running.nodes.values() if node.role == "router"]
        streams = _streams(plan, routers)
        # As routers do: a full collection of this process is no pause of a stream.
        exempt_living_objects()
        collect_rarely()
        await streams.learn()
        await streams.run(plan.streams, partial(_lose_all, plan, routers, streams))
        while used := await running.blocks_used():
            await asyncio.sleep(0.2)
            del used
        return streams.report


def _streams(plan: _Plan, routers: Sequence[Node]) -> Streams | EventSources:
    if plan.client == "events":
        return EventSources([node.openai for node in routers], BODIES)
    # A connection is cut between the router and its clients, at its proxy.
    addresses = [node.address if "cut" in plan.how else node.direct for node in routers]
    requests = any_requests(_MAX_TOKENS) | (embedded_requests() if plan.engine == "embedded" else {})
    return Streams(addresses, requests, Report(), stall_seconds=2.0, programs=plan.programs)


async def _lose_all(plan: _Plan, routers: Sequence[Node], streams: Streams | EventSources) -> None:
    ends_at = time.monotonic() + plan.seconds
    await asyncio.sleep(2.0)
    for number in range(plan.losses):
        if time.monotonic() > ends_at:
            break
        streams.report.losses += 1
        streams.losses.note()
        await _lose(routers[number % 2], plan.how[number // 2 % len(plan.how)])
        if isinstance(streams, Streams):
            await streams.balance(plan.streams)
        # The streams that run go on where they are; each new one is at the router of its client.
        await asyncio.sleep(plan.apart_seconds)


async def _lose(router: Node, how: str) -> None:
    match how:
        case "kill":
            # In a thread: it waits for the end of the process, and the clients share this one.
            await asyncio.to_thread(router.kill)
            # Its start takes a core for a second, of the two that its clients and the other router share here.
            await asyncio.sleep(1.0)
            await asyncio.to_thread(router.start)
        case "restart":
            await router.terminate()
            await asyncio.to_thread(router.start)
        case "pause":
            await asyncio.to_thread(router.pause)
            await asyncio.sleep(_PAUSE_SECONDS)
            router.resume()
        case "cut":
            await router.proxy.cut()
            await asyncio.sleep(_PAUSE_SECONDS)
            await router.proxy.restore()
    await router.serving()


def _add(report: Report, plan: _Plan) -> Report:
    """The sum with what the file has of the same plan, which it has from now on."""
    assert plan.add_to is not None
    known = json.loads(plan.add_to.read_text()) if plan.add_to.exists() else {}
    if plan.name in known:
        report.add(Report(**known[plan.name]))
    known[plan.name] = {**asdict(report), "pauses": [round(pause, 3) for pause in report.pauses]}
    plan.add_to.write_text(json.dumps(known))
    return report


def _parse() -> _Plan:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no router is lost after so long")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--programs", type=int, default=20, help="clients that have the streams; 0: one for each")
    parser.add_argument("--client", choices=("library", "events"), default="library")
    parser.add_argument("--engine", choices=("simulated", "embedded"), default="simulated")
    parser.add_argument("--how", nargs="+", choices=("kill", "pause", "cut", "restart"), default=["kill"])
    parser.add_argument("--apart-seconds", type=float, default=2.0, help="from a router's return to the next loss")
    parser.add_argument("--add-to", type=Path)
    return _Plan(**vars(parser.parse_args()))


def main() -> None:
    plan = _parse()
    with TemporaryDirectory() as folder:
        etcd, began = EtcdServer(Path(folder) / "etcd"), time.monotonic()
        etcd.start()
        try:
            report = asyncio.run(_run(plan, etcd.endpoint, Path(folder)))
        finally:
            etcd.stop()
    print(f"{plan.name}: {report}; {time.monotonic() - began:.0f} s")
    for text in (report.failed + report.different)[:5]:
        print(text[:500])
    if plan.add_to is not None:
        print(f"together: {_add(report, plan)}")


if __name__ == "__main__":
    main()
