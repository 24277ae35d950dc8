"""The router's CPU time for a token of vLLM, and of the embedded engine with the same checkpoint.

    PYTHONPATH=.:tests .venv-vllm/bin/python benchmarks/vllm_router_cost.py

Three processes: the workers, a prefill and a decode worker of each engine; the router; and this one, which is the
client. The engines take turns, so that what else the machine does disturbs both. CPU time is that of the router's
process alone, without what it needs in as many idle seconds: the slower engine has more of them.
benchmarks/results/vllm.md has a run.
"""

import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

from support.engines import vllm
from support.engines.checkpoints import save_qwen3

from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc, sampling_pb2
from benchmarks.processes import child, cpu_nanoseconds, received, run_process, run_router, until_told
from benchmarks.router_overhead import ROUTER
from discovery.memory import MemoryRegistry
from rpc.channels import open_channel
from services.config import WorkerConfig
from services.server import host_worker

ROUNDS = 12
STREAMS = 8
TOKENS = 100
PROMPT_TOKENS = 100
START_SECONDS = 900.0
IDLE_SECONDS = 20.0
ENGINES = ("vllm", "pytorch")
ARGUMENTS = {"max_model_len": 2048, "num_gpu_blocks_override": 200, "max_num_batched_tokens": 2048}


@dataclass(frozen=True, slots=True)
class Cost:
    """The router's CPU time for one round of streams of one engine."""

    tokens: int
    messages: int
    all_microseconds: float
    seconds: float
    idle: float = 0.0

    @property
    def microseconds(self) -> float:
        return self.all_microseconds - self.idle * self.seconds

    @property
    def per_token(self) -> float:
        return self.microseconds / self.tokens

    @property
    def per_message(self) -> float:
        return self.microseconds / self.messages


def run_workers(pipe: Connection, checkpoint: Path) -> None:
    """Serves both roles of both engines until the pipe ends."""

    async def serve() -> None:
        registry = MemoryRegistry("benchmark")
        async with AsyncExitStack() as stack:
            for engine in ENGINES:
                for role in ("prefill", "decode"):
                    await stack.enter_async_context(host_worker(_worker(engine, role, checkpoint), registry))
            pipe.send(registry.workers())
            await until_told(pipe)

    run_process(serve)


def _worker(engine: str, role: str, checkpoint: Path) -> WorkerConfig:
    own = {"kind": "pytorch", "model": str(checkpoint), "max_sequences": vllm.MAX_SEQUENCES, "threads": 1}
    theirs = vllm.settings(checkpoint, ARGUMENTS)
    return WorkerConfig.model_validate(
        {
            "worker_id": f"{engine}-{role}",
            "roles": [role],
            "engine": {**(theirs if engine == "vllm" else own), "name": engine},
            "handoff": {"lease_seconds": vllm.LEASE_SECONDS},
            "drain_seconds": 0,
        }
    )


async def _idle(pid: int) -> float:
    """The router's CPU time for a second without requests, in microseconds."""
    before = cpu_nanoseconds(pid)
    await asyncio.sleep(IDLE_SECONDS)
    return (cpu_nanoseconds(pid) - before) / 1e3 / IDLE_SECONDS


async def _round(stub: inference_service_pb2_grpc.InferenceServiceStub, pid: int, engine: str, number: int) -> Cost:
    async def stream(index: int) -> tuple[int, int]:
        ids = [(number * 31 + index * 17 + position * position) % 300 + 5 for position in range(PROMPT_TOKENS)]
        request = generate_pb2.GenerateRequest(
            model=engine,
            token_ids=generate_pb2.TokenIds(ids=ids),
            sampling=sampling_pb2.SamplingParams(temperature=0),
            stopping=sampling_pb2.StoppingOptions(max_tokens=TOKENS, ignore_eos=True),
        )
        tokens = messages = 0
        async for message in stub.Generate(request):
            if message.HasField("token"):
                tokens += len(message.token.token_ids)
                messages += 1
        return tokens, messages

    started, before = time.perf_counter(), cpu_nanoseconds(pid)
    counted = await asyncio.gather(*map(stream, range(STREAMS)))
    spent = cpu_nanoseconds(pid) - before
    seconds = time.perf_counter() - started
    return Cost(sum(tokens for tokens, _ in counted), sum(messages for _, messages in counted), spent / 1e3, seconds)


async def main() -> None:
    """Prints the cost of each engine, and the ratios of rounds that followed each other."""
    async with AsyncExitStack() as stack:
        checkpoint = save_qwen3(Path(stack.enter_context(TemporaryDirectory())), vllm.HEAD_DIM)
        workers, _ = await stack.enter_async_context(child(run_workers, checkpoint))
        router, pid = await stack.enter_async_context(child(run_router, ROUTER))
        await asyncio.to_thread(workers.poll, START_SECONDS)
        router.send(await received(workers))
        channel = open_channel(await received(router))
        stack.push_async_callback(channel.close)
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        costs: dict[str, list[Cost]] = {engine: [] for engine in ENGINES}
        idle = await _idle(pid)
        for number in range(ROUNDS + 1):
            for engine in ENGINES if number % 2 else reversed(ENGINES):
                cost = await _round(stub, pid, engine, number)
                if number:
                    costs[engine].append(replace(cost, idle=idle))
    print(f"the router, idle: {idle / 1e3:.1f} ms of CPU time a second")
    for engine, found in costs.items():
        print(f"{engine}: {_row(found)}")
    print(f"vllm / pytorch, by rounds: {_ratios(costs)}")


def _row(costs: Sequence[Cost]) -> str:
    token = statistics.median(cost.per_token for cost in costs)
    message = statistics.median(cost.per_message for cost in costs)
    together = sum(cost.tokens for cost in costs) / sum(cost.messages for cost in costs)
    seconds = statistics.median(cost.seconds for cost in costs)
    whole = statistics.median(cost.all_microseconds / cost.tokens for cost in costs)
    timed = f"{whole:.1f} with idle time, {seconds:.1f} s a round"
    return f"{token:.1f} us/token ({timed}), {message:.1f} us/message, {together:.2f} tokens/message"


def _ratios(costs: dict[str, list[Cost]]) -> str:
    pairs = list(zip(*(costs[engine] for engine in ENGINES), strict=True))
    token = statistics.median(theirs.per_token / ours.per_token for theirs, ours in pairs)
    message = statistics.median(theirs.per_message / ours.per_message for theirs, ours in pairs)
    return f"{token:.3f} a token, {message:.3f} a message"


if __name__ == "__main__":
    asyncio.run(main())
