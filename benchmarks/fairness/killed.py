"""A quota that eight routers share, as processes that are killed (`kill -9`) and started again.

The demand is at the routers that run, as behind a load balancer; ten of its seventeen parts are at one of them, which
changes every 20 s. Every 20 s the next router is killed, and started again some seconds later.
"""

import asyncio
import os
import signal
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc import aio

from baton.connection.credentials import TENANT_KEY
from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc
from benchmarks.fairness.fleet import Engines, router_config, run_router, run_workers
from benchmarks.fairness.loads import Bars
from benchmarks.fairness.quotas import ROUTERS, Demand, Quota, Uses, check_quota
from benchmarks.processes import child, received
from router.config import AdmissionConfig, QuotaConfig, QuotasConfig
from rpc.channels import open_channel

# That of each tenant, and its demand, in quotas: what a machine with two cores can carry.
QUOTA = Quota(tokens_per_second=2000.0, requests_per_second=40.0, burst_seconds=1.0, prompt=200)
LOADS = {"greedy": 3.0, "modest": 0.9}
_ENGINES = Engines(prefills=1, step_seconds=0.0, prefill_tokens_per_second=0.0)
_APART_SECONDS, _DOWN_SECONDS = 20.0, 6.0
_WARM_SECONDS = 10.0  # a home begins with an empty bucket


@dataclass
class _Router:
    pid: int
    stub: inference_service_pb2_grpc.InferenceServiceStub


@dataclass
class EightRouters:
    """The fleet, and what its tenants got."""

    stack: AsyncExitStack
    folder: Path
    live: dict[str, _Router] = field(default_factory=dict)
    uses: dict[str, Uses] = field(default_factory=lambda: {tenant: Uses() for tenant in LOADS})
    killed: int = 0

    async def start(self, name: str) -> None:
        """A process of a router, ready."""
        quota = QuotaConfig(
            tokens_per_second=QUOTA.tokens_per_second,
            requests_per_second=QUOTA.requests_per_second,
            burst_seconds=QUOTA.burst_seconds,
        )
        config = router_config(self.folder, AdmissionConfig(), QuotasConfig(tenants=dict.fromkeys(LOADS, quota)))
        pipe, pid = await self.stack.enter_async_context(child(run_router, config, 2))
        channel = await self.stack.enter_async_context(open_channel(await received(pipe)))
        self.live[name] = _Router(pid, inference_service_pb2_grpc.InferenceServiceStub(channel))

    async def kill_in_turn(self) -> None:
        """Kills one router after another once the fleet has warmed up, until cancelled."""
        await asyncio.sleep(_WARM_SECONDS)
        for number in range(1000):
            await asyncio.sleep(_APART_SECONDS - _DOWN_SECONDS)
            name = f"r{number % ROUTERS}"
            os.kill(self.live.pop(name).pid, signal.SIGKILL)
            self.killed += 1
            await asyncio.sleep(_DOWN_SECONDS)
            await self.start(name)

    async def send(self, seconds: float) -> None:
        """Sends the demand of all tenants for some time, without a pause, which would leave quota unused."""
        began = time.monotonic()
        await asyncio.gather(*(self._send(tenant, seconds, began) for tenant in LOADS))

    async def _send(self, tenant: str, seconds: float, began: float) -> None:
        demand, due = Demand(QUOTA, LOADS[tenant]), time.monotonic()
        ends, tasks = due + seconds, set()
        while due < ends:
            due += demand.spacing
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            name = demand.choose(due - began, sorted(self.live))
            task = asyncio.create_task(self._ask(self.live[name], tenant, began))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    async def _ask(self, router: _Router, tenant: str, began: float) -> None:
        request = generate_pb2.GenerateRequest(prompt="x" * QUOTA.prompt, stopping={"max_tokens": 1})
        asked = generate_pb2.GenerateUnaryRequest(request=request)
        uses, sent = self.uses[tenant], time.monotonic()
        try:
            await router.stub.GenerateUnary(asked, timeout=10, metadata=((TENANT_KEY, tenant),))
            uses.passed.append((sent - began, time.monotonic() - began))
        except aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
                uses.refused += 1
            else:
                uses.failed += 1


async def measure_quota(bars: Bars, seconds: float, *, kills: bool) -> None:
    """One run, with the demands of all tenants at the same time."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers, _ = await stack.enter_async_context(child(run_workers, folder, _ENGINES))
        await received(workers)
        fleet = EightRouters(stack, folder)
        await asyncio.gather(*(fleet.start(f"r{number}") for number in range(ROUTERS)))
        killing = [asyncio.create_task(fleet.kill_in_turn())] if kills else []
        await fleet.send(_WARM_SECONDS + seconds)
        for task in killing:
            task.cancel()
        await asyncio.gather(*killing, return_exceptions=True)
        print(f"{ROUTERS} routers as processes, {seconds:.0f} s, {fleet.killed} times a router was killed", flush=True)
        name = "killed" if kills else "moving demand"
        for tenant, load in LOADS.items():
            check_quota(bars, QUOTA, fleet.uses[tenant], (load, _WARM_SECONDS, _WARM_SECONDS + seconds), name)
