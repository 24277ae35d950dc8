"""A routing policy's results on a trace: hit rate, time to first token, balance, and what deciding costs.

    python benchmarks/routing/whole_system.py [--trace FILE] [--policies NAME ...] [--seeds N ...] [--output FILE]

The whole system: simulated workers in one process, a router in another, and this one, the client, which sends each
request at its time whether or not others have been answered. A trace is shortened to `--block-tokens` for each 512 of
its tokens and sped up by `--speedup`; prefill is as fast as makes the workers `--load` busy without any cache. All
policies get the same requests one after the other; only ratios within one run mean something.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection

from grpc import aio

from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc, sampling_pb2
from benchmarks.processes import child, cpu_nanoseconds, received, run_process, run_router, until_told
from benchmarks.routing.comparison import Answer, Plan, Result, compare, read_options, summary
from devtools.bench.traces import TracedRequest, prompt_ids
from discovery.memory import MemoryRegistry
from router.config import ProbeConfig, RouterConfig, RoutingConfig
from rpc.channels import open_channel
from services.config import WorkerConfig
from services.engines.simulated.config import SimulatedConfig
from services.server import host_worker

CONNECTIONS = 8
POLICIES = ("least_loaded", "predicted_seconds")


def run_workers(pipe: Connection, plan: Plan, num_blocks: int, tokens_per_second: float) -> None:
    """Serves until the pipe ends."""

    async def serve() -> None:
        registry = MemoryRegistry("benchmark")
        async with AsyncExitStack() as stack:
            for role, number in (("prefill", plan.prefill), ("decode", plan.decode)):
                for index in range(number):
                    config = worker_config(f"{role}-{index}", role, plan, num_blocks, tokens_per_second)
                    await stack.enter_async_context(host_worker(config, registry))
            pipe.send(registry.workers())
            await until_told(pipe)

    run_process(serve)


def worker_config(name: str, role: str, plan: Plan, num_blocks: int, tokens_per_second: float) -> WorkerConfig:
    return WorkerConfig(
        worker_id=name,
        roles=(role,),  # type: ignore[arg-type]
        engine=SimulatedConfig(
            num_blocks=num_blocks,
            block_tokens=plan.block_tokens,
            block_bytes=plan.block_tokens * 2,
            max_context_tokens=200_000,
            prefill_chunk_tokens=16 * plan.block_tokens,
            prefill_tokens_per_second=tokens_per_second,
            decode_step_seconds=plan.decode_step_seconds,
            kv_events=plan.kv_events,
        ),
        transports=("shm",),
        drain_seconds=0,
    )


def router_config(policy: str) -> RouterConfig:
    return RouterConfig(
        listen="127.0.0.1:0",
        metrics_listen="127.0.0.1:0",
        drain_seconds=0,
        probe=ProbeConfig(timeout_seconds=10.0, hung_seconds=30.0),  # a machine under load is no fault of a worker
        routing=RoutingConfig(policy=policy),  # type: ignore[arg-type]
    )


async def measure(policy: str, seed: int, trace: Sequence[TracedRequest], plan: Plan) -> Result:
    """One policy on one trace, with processes of its own."""
    prompts = [prompt_ids(request, plan.block_tokens) for request in trace]
    unique = len({number for request in trace for number in request.hash_ids})
    seconds = trace[-1].at_seconds / plan.speedup
    speed = sum(map(len, prompts)) / seconds / plan.prefill / plan.load
    num_blocks = max(int(unique * plan.cache_share), 2 * max(len(request.hash_ids) for request in trace))
    async with (
        child(run_workers, plan, num_blocks, speed) as (workers, _),
        child(run_router, router_config(policy)) as (router, router_pid),
    ):
        router.send(await received(workers))
        address = await received(router)
        before = cpu_nanoseconds(router_pid)
        answers = await replay(address, trace, prompts, plan)
        cpu = cpu_nanoseconds(router_pid) - before
    good = [answer for answer in answers if answer]
    return summary(policy, seed, good, len(answers) - len(good), plan, cpu / 1e3 / len(good))


async def replay(
    address: str, trace: Sequence[TracedRequest], prompts: Sequence[Sequence[int]], plan: Plan
) -> list[Answer | None]:
    """Sends every request at its time; None for one that failed."""
    channels = [open_channel(address) for _ in range(CONNECTIONS)]
    stubs = [inference_service_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
    start = time.perf_counter() + 0.5

    async def one(index: int) -> Answer | None:
        await asyncio.sleep(max(0.0, start + trace[index].at_seconds / plan.speedup - time.perf_counter()))
        return await ask(stubs[index % CONNECTIONS], prompts[index], plan.answer_tokens(trace[index]))

    answers = await asyncio.gather(*(one(index) for index in range(len(trace))))
    for channel in channels:
        await channel.close()
    return answers


async def ask(stub: inference_service_pb2_grpc.InferenceServiceStub, ids: Sequence[int], output: int) -> Answer | None:
    request = generate_pb2.GenerateRequest(
        token_ids=generate_pb2.TokenIds(ids=ids),
        stopping=sampling_pb2.StoppingOptions(max_tokens=output, ignore_eos=True),
    )
    sent = time.perf_counter()
    ttft = 0.0
    try:
        async for message in stub.Generate(request, timeout=300):
            if message.HasField("token") and not ttft:
                ttft = time.perf_counter() - sent
            if message.HasField("finished"):
                end = message.finished
                return Answer(
                    ttft=ttft,
                    seconds=time.perf_counter() - sent,
                    tokens=len(ids),
                    cached=end.usage.cached_tokens,
                    output=end.usage.completion_tokens,
                    worker_id=end.prefill_worker_id or end.decode_worker_id,
                    is_local=not end.prefill_worker_id,
                )
    except aio.AioRpcError as error:
        print(f"failed: {error.code().name} {error.details()}")
    return None


if __name__ == "__main__":
    asyncio.run(compare(measure, read_options(__doc__, POLICIES)))
