"""Where the time to the first token goes outside of prefill: the stages of one request at a time, on a CPU.

    python -m benchmarks.first_token [--engine simulated] [--servers http2 grpcio] [--rounds 100] [--lengths 16 4000]

A prefill worker, a decode worker, a router and this client are processes of their own; prompts are token ids, all
different. The embedded engine computes a tiny model of random weights with a large vocabulary, by the code that runs on
GPUs; the simulated one takes no time. A stage is what passed in it before the first token was sent. `client` is what
the client waited beyond the stages: its own serialization, the way to the router before the call's arrival there, and
the first token's way back. `outside` is all but prefill_queue and prefill_compute. Least values of the rounds, ms, and
the median of `outside`; CPU time is that of a process for a whole request of two tokens.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc, timing_pb2
from baton.inference.v1.sampling_pb2 import SamplingParams, StoppingOptions
from benchmarks.processes import child, cpu_nanoseconds, received, run_process, run_router, until_told
from benchmarks.request_cost import patient_router
from benchmarks.two_gpus.report import table
from discovery.memory import MemoryRegistry
from router.telemetry.stages import name_of
from rpc.channels import open_channel
from rpc.server import ServerKind
from services.config import WorkerConfig
from services.server import host_worker

WARM_UPS = 20
VOCABULARIES = {"embedded": 128_256, "simulated": 256}
_PREFILL = ("prefill_queue", "prefill_compute")
_SHOWN = ("admission", "tokenize", "route", "unattributed", "detokenize", "client")


def run_worker(pipe: Connection, engine: dict[str, Any], role: str, server: ServerKind) -> None:
    """Serves a role until the pipe ends. Sends its record."""
    if engine["kind"] == "pytorch":
        import benchmarks.two_gpus.model  # noqa: F401  # random weights in the place of reading them

    async def serve() -> None:
        registry = MemoryRegistry("benchmark")
        config = WorkerConfig.model_validate(
            {"worker_id": role, "roles": (role,), "engine": engine, "drain_seconds": 0, "server": server}
        )
        async with host_worker(config, registry):
            pipe.send(registry.workers())
            await until_told(pipe)

    run_process(serve)


@dataclass(frozen=True, slots=True)
class Request:
    """Milliseconds before the first token, by stage, and in all as the client saw it."""

    stages: dict[str, float]
    first_token: float

    @property
    def prefill(self) -> float:
        return sum(self.stages.get(name, 0.0) for name in _PREFILL)

    @property
    def outside(self) -> float:
        return self.first_token - self.prefill


async def ask(stub: inference_service_pb2_grpc.InferenceServiceStub, ids: Sequence[int]) -> Request:
    request = generate_pb2.GenerateRequest(
        token_ids=generate_pb2.TokenIds(ids=ids),
        sampling=SamplingParams(temperature=0.0),
        stopping=StoppingOptions(max_tokens=2, ignore_eos=True),
        routing=generate_pb2.RoutingOptions(topology=generate_pb2.TOPOLOGY_DISAGGREGATED),
    )
    sent, first = time.perf_counter(), 0.0
    timings: Sequence[timing_pb2.StageTiming] = ()
    async for message in stub.Generate(request, timeout=120):
        if message.HasField("token"):
            first = first or (time.perf_counter() - sent) * 1e3
        if message.HasField("finished"):
            timings = message.finished.timings
    stages: dict[str, float] = {}
    for timing in timings:
        name = name_of(timing.stage)
        stages[name] = stages.get(name, 0.0) + timing.before_first_token.ToNanoseconds() / 1e6
    stages["client"] = first - sum(stages.values())
    return Request(stages, first)


async def measure(engine: str, folder: str, server: ServerKind, lengths: Sequence[int], rounds: int) -> None:
    sizes = {"num_blocks": 4096, "block_bytes": 64, "max_context_tokens": 8192}
    options: dict[str, Any] = {"kind": "simulated", **sizes}
    if engine == "embedded":
        options = {"kind": "pytorch", "model": folder, "name": "tiny", "kv_cache_bytes": 256 << 20, "threads": 1}
        options["execution"] = "fused"
    async with (
        child(run_worker, options, "prefill", server) as (prefill, prefill_pid),
        child(run_worker, options, "decode", server) as (decode, _),
        child(run_router, patient_router(server)) as (router, router_pid),
    ):
        router.send([*await received(prefill), *await received(decode)])
        async with open_channel(await received(router)) as channel:
            stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
            rows = []
            for length in lengths:
                prompts = [random.choices(range(VOCABULARIES[engine]), k=length) for _ in range(WARM_UPS + rounds)]
                for ids in prompts[:WARM_UPS]:
                    await ask(stub, ids)
                before = [cpu_nanoseconds(pid) for pid in (router_pid, prefill_pid)]
                found = [await ask(stub, ids) for ids in prompts[WARM_UPS:]]
                after = [cpu_nanoseconds(pid) for pid in (router_pid, prefill_pid)]
                cpu = [(b - a) / 1e6 / rounds for a, b in zip(before, after, strict=True)]
                rows.append([server, length, *_row(found), *(f"{one:.2f}" for one in cpu)])
    heads = ["server", "tokens", "first token", "prefill", *_SHOWN, "outside", "median", "router CPU", "prefill CPU"]
    table(heads, rows)


def _row(found: Sequence[Request]) -> list[str]:
    def least(of: Callable[[Request], float]) -> str:
        return f"{min(map(of, found)):.2f}"

    stages = [least(lambda one, name=name: one.stages.get(name, 0.0)) for name in _SHOWN]  # type: ignore[misc]
    median = statistics.median(one.outside for one in found)
    totals = [least(lambda one: one.first_token), least(lambda one: one.prefill)]
    return [*totals, *stages, least(lambda one: one.outside), f"{median:.2f}"]


async def main(arguments: argparse.Namespace) -> None:
    from benchmarks.two_gpus.model import folder_of, small_shape

    shape = small_shape()
    shape.vocab_size = VOCABULARIES["embedded"]
    with folder_of(shape) as folder:
        for server in arguments.servers:
            await measure(arguments.engine, str(folder), server, arguments.lengths, arguments.rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("embedded", "simulated"), default="embedded")
    parser.add_argument("--servers", nargs="+", choices=("http2", "grpcio"), default=["http2", "grpcio"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[16, 512, 4000])
    parser.add_argument("--rounds", type=int, default=100)
    asyncio.run(main(parser.parse_args()))
