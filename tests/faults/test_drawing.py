"""The role `diffuse`, at each step of pictures and clips: killed, paused, cut off, frozen, cancelled.

Whatever happens to a worker, the other one draws the same; what a client does ends the work.
"""

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from support.cluster.fleet import Fleet, FleetPlan, fleet
from support.servers.etcd import EtcdServer

from baton.calls import stream
from baton.errors import BatonError
from baton.inference.v1 import generate_pb2, image_pb2, image_pb2_grpc, video_pb2, video_pb2_grpc
from engine_protocol.fault_injection import FAULT_KEY
from rpc.channels import open_channel
from runtime.aio import timeout

STEPS, AT_ONCE = 10, 4
WORKER = (
    "engine={kind: simulated, name: demo, allow_faults: true, draw_step_seconds: 0.08}",
    "drain_seconds=2",
)
ROUTER = (
    "allow_faults=true",
    "probe={interval_seconds: 0.3, timeout_seconds: 0.7, hung_seconds: 1.5}",
    "retry.budget_floor=1000",
    "drain_seconds=2",
)
# A plan that keeps calls at their beginning; drawing takes long anyway.
METADATA = {"queued": ((FAULT_KEY, "delay=0.6@queue;attempt=1"),), "drawing": ()}
FULL = os.environ.get("BATON_FAULTS") == "full"
TO_PROCESSES = ("kill", "pause", "cut", "freeze")
CELLS = [(what, step) for what in TO_PROCESSES for step in METADATA]
BY_CLIENTS = ("leave", "deadline", "cancel")
PLANS = ("crash@diffuse;attempt=1", "hang@queue;attempt=1", "hang@diffuse;attempt=1")


@dataclass(eq=False)
class Drawn:
    """The messages that a call has received so far. `files` are those of its last attempt."""

    kind: str
    seed: int
    steps: int = 0
    files: dict[int, bytes] = field(default_factory=dict)
    error: BatonError | None = None

    def take(self, event: Any) -> None:
        match event.WhichOneof("event"):
            case "progress":
                self.steps += 1
            case "image":
                self.files[0] = event.image.data
            case "frame":
                self.files[event.frame.number] = event.frame.data


class Site:
    """A fleet, and what its pictures and clips look like where nothing happens."""

    def __init__(self, running: Fleet, channel: aio.Channel) -> None:
        self.fleet = running
        self._calls = {
            "picture": image_pb2_grpc.ImageServiceStub(channel),
            "clip": video_pb2_grpc.VideoServiceStub(channel),
        }
        self.expected: dict[tuple[str, int], dict[int, bytes]] = {}

    async def draw(self, drawn: Drawn, seconds: float = 60.0, metadata: Any = ()) -> None:
        options = image_pb2.ImageOptions(prompt="a red circle", seed=drawn.seed, steps=STEPS)
        about = {"request_id": f"{drawn.kind}-{drawn.seed}-{id(drawn)}", "options": options}
        request = (
            image_pb2.ImageServiceGenerateRequest(**about)
            if drawn.kind == "picture"
            else video_pb2.VideoServiceGenerateRequest(**about)
        )
        call = self._calls[drawn.kind].Generate(request, timeout=seconds, metadata=metadata)
        try:
            async for event in stream(call):
                drawn.take(event)
        except BatonError as error:
            drawn.error = error
        finally:
            call.cancel()

    def check(self, drawn: Sequence[Drawn]) -> None:
        for one in drawn:
            assert one.error is None, one
            assert one.files == self.expected[one.kind, one.seed], (one.kind, one.seed)

    async def disturb(self, what: str, name: str) -> None:
        node = self.fleet.nodes[name]
        match what:
            case "kill":
                node.kill()
            case "pause":
                node.pause()
                await asyncio.sleep(2)
                node.resume()
            case "cut":
                await node.proxy.cut()
                await asyncio.sleep(1)
                await node.proxy.restore()
            case "freeze":
                node.proxy.freeze()
                await asyncio.sleep(2)
                await node.proxy.restore()

    async def heal(self) -> None:
        """Restarts what was killed, and waits until nothing is computed any more."""
        for node in self.fleet.workers:
            if not node.is_alive:
                node.start()
                await node.serving()
        await self.fleet.ready()
        async with timeout(30):
            for node in self.fleet.workers:
                while (load := await self.fleet.load(node.name)).running or load.waiting:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)


def some() -> list[Drawn]:
    return [Drawn(kind, seed) for kind in ("picture", "clip") for seed in range(AT_ONCE // 2)]


@pytest.mark.timeout(300)
async def test_whatever_happens_to_a_worker_or_by_a_client_nothing_is_lost_and_nothing_stays(
    shared_etcd: EtcdServer, tmp_path: Path
) -> None:
    plan = FleetPlan("drawing", shared_etcd.endpoint, WORKER, ROUTER, prefill=0, decode=0, diffuse=2)
    async with fleet(plan, tmp_path) as running, open_channel(running.router.address) as channel:
        site = Site(running, channel)
        for drawn in some():
            await site.draw(drawn)
            assert drawn.error is None
            site.expected[drawn.kind, drawn.seed] = drawn.files
        assert len({tuple(files.items()) for files in site.expected.values()}) == AT_ONCE

        for what, step in CELLS if FULL else CELLS[1::3]:
            calls = some()
            tasks = [asyncio.ensure_future(site.draw(one, metadata=METADATA[step])) for one in calls]
            await _reached(step, calls)
            await site.disturb(what, "diffuse-0")
            await asyncio.gather(*tasks)
            site.check(calls)
            await site.heal()

        for faults in PLANS if FULL else PLANS[:1]:
            for one in some()[::2]:  # one at a time: each kills a worker
                await site.draw(one, metadata=((FAULT_KEY, faults),))
                site.check([one])
                await site.heal()

        for what in BY_CLIENTS:
            calls = some()
            tasks = [asyncio.ensure_future(site.draw(one, 1.5 if what == "deadline" else 60)) for one in calls]
            await _reached("drawing", calls)
            if what == "leave":
                for task in tasks:
                    task.cancel()
            if what == "cancel":
                for one in calls:
                    asked = generate_pb2.CancelGenerationRequest(request_id=f"{one.kind}-{one.seed}-{id(one)}")
                    with suppress(aio.AioRpcError):  # it may have ended already
                        await running.stub.CancelGeneration(asked, timeout=60)
            await asyncio.gather(*tasks, return_exceptions=True)
            reasons = {one.error.reason for one in calls if one.error}
            assert reasons <= {"CANCELLED", "DEADLINE_EXCEEDED", "DEADLINE_UNREACHABLE"}
            assert bool(reasons) == (what != "leave")
            await site.heal()


async def _reached(step: str, calls: Sequence[Drawn]) -> None:
    """Waits until the calls are held, or until one is drawn."""
    if step == "queued":
        await asyncio.sleep(0.3)
        return
    async with timeout(30):
        while not any(one.steps for one in calls):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
