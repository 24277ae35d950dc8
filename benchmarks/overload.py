"""Overload: do admitted requests meet their deadlines at twice a cluster's capacity, and is prefill wasted?

A router and simulated workers run in separate processes. First the capacity is measured: requests one after another in
as many lanes as the workers take. Then requests arrive at twice that rate, at random times, each with a deadline,
without waiting for the others. It prints, for the router with and without admission control:

    admitted in time   of the requests whose Started message came, those that completed before their deadline
    prefill wasted     of the prompt tokens of these requests, those of requests that were not (an upper bound: a
                       prompt that never started counts too)

    python -m benchmarks.overload [--seconds 20] [--load 2.0]

Exit code 1 if with admission control under 95 % are in time, or 5 % of prefill or more is wasted.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from grpc import aio

from baton.error_details import from_rpc_error
from baton.errors import BatonError
from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc
from benchmarks.processes import child, received, run_process, run_router, until_told
from discovery.memory import MemoryRegistry
from router.config import AdmissionConfig, RouterConfig
from rpc.channels import open_channel
from services.config import WorkerConfig
from services.engines.simulated.config import SimulatedConfig
from services.server import host_worker

PREFILL_TOKENS_PER_SECOND = 8000.0
DECODE_STEP_SECONDS = 0.02
MAX_BATCH = 16
PROMPT_TOKENS = (100, 1500)
ANSWER_TOKENS = (10, 60)
DEADLINE_SECONDS = (1.5, 4.0)
LANES = 16


@dataclass
class Outcome:
    """The outcomes of the requests of one run."""

    sent: int = 0
    admitted: int = 0
    in_time: int = 0
    prompt_tokens: int = 0
    wasted_tokens: int = 0
    seconds: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def in_time_share(self) -> float:
        return self.in_time / max(1, self.admitted)

    @property
    def wasted_share(self) -> float:
        return self.wasted_tokens / max(1, self.prompt_tokens)


def run_workers(pipe: Connection) -> None:
    """Serves a prefill and a decode worker until the pipe ends."""

    async def serve() -> None:
        registry = MemoryRegistry("benchmark")
        async with AsyncExitStack() as stack:
            for role in ("prefill", "decode"):
                await stack.enter_async_context(host_worker(worker_config(role), registry))
            pipe.send(registry.workers())
            await until_told(pipe)

    run_process(serve)


def worker_config(role: str) -> WorkerConfig:
    return WorkerConfig(
        worker_id=role,
        roles=(role,),  # type: ignore[arg-type]
        engine=SimulatedConfig(
            num_blocks=8192,
            block_bytes=64,
            max_batch=MAX_BATCH,
            prefill_tokens_per_second=PREFILL_TOKENS_PER_SECOND,
            decode_step_seconds=DECODE_STEP_SECONDS,
        ),
        transports=("shm",),
        drain_seconds=0,
    )


class Client:
    """Sends requests of random sizes and deadlines, the same in every run."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._stub = inference_service_pb2_grpc.InferenceServiceStub(self._channel)
        self._random = random.Random(7)
        self._number = 0

    async def close(self) -> None:
        await self._channel.close()

    async def capacity(self, seconds: float) -> float:
        """Requests a second with all lanes full."""
        outcome = Outcome()
        end = time.monotonic() + seconds

        async def lane() -> None:
            while time.monotonic() < end:
                await self._send(outcome, 60.0)

        started = time.monotonic()
        await asyncio.gather(*(lane() for _ in range(LANES)))
        return outcome.in_time / (time.monotonic() - started)

    async def load(self, rate: float, seconds: float) -> Outcome:
        """Requests that arrive at random times, `rate` a second."""
        outcome = Outcome()
        started = time.monotonic()
        tasks = []
        while time.monotonic() - started < seconds:
            await asyncio.sleep(self._random.expovariate(rate))
            tasks.append(asyncio.create_task(self._send(outcome, self._random.uniform(*DEADLINE_SECONDS))))
        await asyncio.gather(*tasks)
        outcome.seconds = time.monotonic() - started
        return outcome

    async def _send(self, outcome: Outcome, deadline_seconds: float) -> None:
        self._number += 1
        tokens = self._random.randint(*PROMPT_TOKENS)
        request = generate_pb2.GenerateRequest(prompt=f"{self._number:08d}".ljust(tokens, "x"))
        request.stopping.max_tokens = self._random.randint(*ANSWER_TOKENS)
        outcome.sent += 1
        is_admitted = is_complete = False
        try:
            async for message in self._stub.Generate(request, timeout=deadline_seconds):
                is_admitted = True
                is_complete = message.HasField("finished")
        except aio.AioRpcError as error:
            outcome.refused[_reason(from_rpc_error(error), is_admitted)] += 1
        outcome.admitted += is_admitted
        outcome.in_time += is_complete
        outcome.prompt_tokens += tokens if is_admitted else 0
        outcome.wasted_tokens += tokens if is_admitted and not is_complete else 0


def _reason(error: BatonError, is_admitted: bool) -> str:
    return f"{error.reason} {'after admission' if is_admitted else 'at admission'}"


async def measure(admission: AdmissionConfig, load: float, seconds: float) -> tuple[float, Outcome]:
    """The capacity, and the outcomes at `load` times that."""
    async with AsyncExitStack() as stack:
        workers, _ = await stack.enter_async_context(child(run_workers))
        config = RouterConfig(listen="127.0.0.1:0", drain_seconds=0, admission=admission)
        router, _ = await stack.enter_async_context(child(run_router, config))
        router.send(await received(workers))
        client = Client(await received(router))
        stack.push_async_callback(client.close)
        capacity = await client.capacity(5.0)
        return capacity, await client.load(load * capacity, seconds)


async def run(arguments: argparse.Namespace) -> bool:
    is_good = True
    print("| router | capacity/s | sent/s | admitted | done in time/s | admitted in time | prefill wasted |")
    print("|---|---|---|---|---|---|---|")
    lets_all_in = AdmissionConfig(predict_deadlines=False)
    admits = AdmissionConfig(max_running_per_worker=MAX_BATCH)
    for name, admission in (("without admission control", lets_all_in), ("with admission control", admits)):
        capacity, outcome = await measure(admission, arguments.load, arguments.seconds)
        print(
            f"| {name} | {capacity:.1f} | {outcome.sent / outcome.seconds:.1f} | {outcome.admitted} of {outcome.sent} "
            f"| {outcome.in_time / outcome.seconds:.1f} | {outcome.in_time_share:.1%} | {outcome.wasted_share:.1%} |",
            flush=True,
        )
        print(f"  {dict(outcome.refused)}", file=sys.stderr)
        is_good = outcome.in_time_share >= 0.95 and outcome.wasted_share < 0.05
    return is_good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--load", type=float, default=2.0, help="times the capacity")
    sys.exit(0 if asyncio.run(run(parser.parse_args())) else 1)


if __name__ == "__main__":
    main()
