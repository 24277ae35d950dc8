"""The second token of a prompt whose handoff begins while it is computed, as a ratio to one that begins afterwards.

    python benchmarks/early_handoff.py [--tokens 4096] [--kibibytes 128] [--rounds 15] [--transports tcp,shm]

Two workers in processes of their own, which compute 512 tokens a step, at the given rate, and have so much KV a token:
a Llama of 8B in bfloat16 has 128 KiB. Two routers, one of which begins early, ask them in turns, so that other load
affects both. "Second token" is the time from the first to the second one: the handoff, and one step.
"""

import argparse
import asyncio
import random
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc, timing_pb2
from baton.inference.v1.sampling_pb2 import SamplingParams, StoppingOptions
from benchmarks.processes import child, received, routing, run_process, until_told
from discovery.memory import MemoryRegistry
from discovery.record import WorkerRecord
from router.config import ProbeConfig, RouterConfig, RoutingConfig
from rpc.channels import open_channel
from services.config import WorkerConfig
from services.engines.simulated.config import SimulatedConfig
from services.server import host_worker

_BLOCK_TOKENS = 16
_HANDOFF = (timing_pb2.STAGE_HANDOFF_WAIT, timing_pb2.STAGE_HANDOFF_TRANSFER)


@dataclass(frozen=True)
class Measured:
    """Milliseconds: as the client saw the first two tokens, and of the handoff as the decode worker reported it."""

    first_token: float
    second_token: float  # after the first one
    handoff: float


@dataclass(frozen=True)
class Shape:
    """Prompts, and how fast they are computed."""

    tokens: int
    tokens_per_second: float
    token_bytes: int


def serve(pipe: Connection, role: str, transport: str, shape: Shape) -> None:
    """A worker with room for two prompts. Sends its record."""
    engine = SimulatedConfig(
        name="benchmark",
        block_tokens=_BLOCK_TOKENS,
        block_bytes=_BLOCK_TOKENS * shape.token_bytes,
        num_blocks=2 * shape.tokens // _BLOCK_TOKENS + 8,
        prefill_chunk_tokens=512,
        prefill_tokens_per_second=shape.tokens_per_second,
        decode_step_seconds=0.01,
    )
    config = WorkerConfig(
        worker_id=role,
        roles=(role,),  # type: ignore[arg-type]
        engine=engine,
        transports=(transport,),
        drain_seconds=0,
    )

    async def main() -> None:
        registry = MemoryRegistry("benchmark")
        async with host_worker(config, registry):
            pipe.send(registry.workers())
            await until_told(pipe)

    run_process(main)


def router(early_tokens: int) -> RouterConfig:
    return RouterConfig(
        listen="127.0.0.1:0",
        drain_seconds=0,
        probe=ProbeConfig(timeout_seconds=10.0, hung_seconds=30.0),
        routing=RoutingConfig(policy="least_loaded", early_handoff_tokens=early_tokens),
    )


async def ask(stub: inference_service_pb2_grpc.InferenceServiceStub, tokens: int) -> Measured:
    request = generate_pb2.GenerateRequest(
        token_ids=generate_pb2.TokenIds(ids=[random.randrange(200) for _ in range(tokens)]),
        sampling=SamplingParams(temperature=0.0),
        stopping=StoppingOptions(max_tokens=8, ignore_eos=True),
        routing=generate_pb2.RoutingOptions(topology=generate_pb2.TOPOLOGY_DISAGGREGATED),
    )
    sent, times = time.perf_counter(), []
    finished = generate_pb2.Finished()
    async for message in stub.Generate(request, timeout=120):
        times += [time.perf_counter()] * len(message.token.token_ids)
        finished = message.finished if message.HasField("finished") else finished
    handoff = sum(stage.duration.ToNanoseconds() / 1e6 for stage in finished.timings if stage.stage in _HANDOFF)
    return Measured((times[0] - sent) * 1e3, (times[1] - times[0]) * 1e3, handoff)


async def measure(transport: str, shape: Shape, rounds: int) -> None:
    """One transport: both ways in turns, and a line for each."""
    async with (
        child(serve, "prefill", transport, shape) as (prefill, _),
        child(serve, "decode", transport, shape) as (decode, _),
    ):
        records: list[WorkerRecord] = [*await received(prefill), *await received(decode)]
        async with (
            routing(router(0), records) as after,
            routing(router(1), records) as early,
            open_channel(after) as channel_after,
            open_channel(early) as channel_early,
        ):
            stubs = {
                "after": inference_service_pb2_grpc.InferenceServiceStub(channel_after),
                "early": inference_service_pb2_grpc.InferenceServiceStub(channel_early),
            }
            found: dict[str, list[Measured]] = {name: [] for name in stubs}
            for _ in range(rounds + 1):
                for name, stub in stubs.items():
                    found[name].append(await ask(stub, shape.tokens))
    size, seconds = shape.tokens * shape.token_bytes / 2**20, shape.tokens / shape.tokens_per_second
    print(f"{transport}: {shape.tokens} tokens, {size:.0f} MiB of KV, computed in {seconds:.2f} s; medians in ms")
    for name, requests in found.items():
        first, second, handoff = (
            statistics.median(values)
            for values in zip(*((one.first_token, one.second_token, one.handoff) for one in requests[1:]), strict=True)
        )
        print(f"  {name:5}  first token {first:7.1f}  second token {second:7.1f}  of it the handoff {handoff:7.1f}")
    ratios = [
        early.second_token / after.second_token
        for early, after in zip(found["early"][1:], found["after"][1:], strict=True)
    ]
    print(f"  early / after, second token: median of {rounds} pairs {statistics.median(ratios):.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--kibibytes", type=int, default=128, help="KV of a token")
    parser.add_argument("--rate", type=float, default=8000.0, help="prompt tokens a second")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--transports", default="tcp,shm")
    options = parser.parse_args()
    for transport in options.transports.split(","):
        shape = Shape(options.tokens, options.rate, options.kibibytes * 1024)
        asyncio.run(measure(transport, shape, options.rounds))


if __name__ == "__main__":
    main()
