"""A decode step as a client of the router sees it, beside the same step at the face of the engine.

    python -m benchmarks.two_gpus.decode_through_grpc

Prefill on GPU 0, decode on GPU 1, a router and this client, each a process of its own. Then the same engine alone, in
this process.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise

import uvloop

from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc
from baton.inference.v1.sampling_pb2 import SamplingParams, StoppingOptions
from benchmarks.gpu import arrivals
from benchmarks.gpu_transfer import TINY
from benchmarks.two_gpus.cluster import cluster
from benchmarks.two_gpus.model import CONTEXT, VOCABULARY, big_shape, engine_of
from benchmarks.two_gpus.report import quantile, table
from rpc.channels import open_channel
from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.engine import PyTorchEngine

BATCHES = (1, 4) if TINY else (1, 16, 64)
TOKENS = 24 if TINY else 256
START = CONTEXT - TOKENS // 2

Answer = Callable[[Sequence[int]], Awaitable[list[float]]]
"""Asks for TOKENS tokens, and returns when each came."""


def through_router(stub: inference_service_pb2_grpc.InferenceServiceStub) -> Answer:
    async def ask(ids: Sequence[int]) -> list[float]:
        request = generate_pb2.GenerateRequest(
            token_ids=generate_pb2.TokenIds(ids=ids),
            sampling=SamplingParams(temperature=0.0),
            stopping=StoppingOptions(max_tokens=TOKENS, ignore_eos=True),
            routing=generate_pb2.RoutingOptions(topology=generate_pb2.TOPOLOGY_DISAGGREGATED),
        )
        times: list[float] = []
        async for message in stub.Generate(request, timeout=120):
            times += [time.perf_counter()] * len(message.token.token_ids)
        return times

    return ask


def from_engine(engine: PyTorchEngine) -> Answer:
    greedy = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    return lambda ids: arrivals(engine, Prompt(tuple(ids)), greedy)


async def step(ask: Answer, batch: int) -> list[object]:
    """Milliseconds from token to token while all of a batch decode, the second time."""
    for turn in range(2):
        chance = random.Random(10 * batch + turn)
        prompts = [chance.choices(range(3, VOCABULARY), k=START) for _ in range(batch)]
        streams = await asyncio.gather(*(ask(ids) for ids in prompts))
    begin, end = max(times[4] for times in streams), min(times[-1] for times in streams)
    inside = [[at for at in times if begin <= at <= end] for times in streams]
    means = [(times[-1] - times[0]) / (len(times) - 1) * 1e3 for times in inside if len(times) > 3]
    gaps = [(b - a) * 1e3 for times in inside for a, b in pairwise(times)]
    mean = statistics.median(means) if means else float("nan")
    return [batch, mean, quantile(gaps, 0.5), quantile(gaps, 0.99)]


async def main() -> None:
    async with cluster("1 prefill + 1 decode", big_shape()) as [address], open_channel(address) as channel:
        ask = through_router(inference_service_pb2_grpc.InferenceServiceStub(channel))
        routed = [await step(ask, batch) for batch in BATCHES]
    async with engine_of(big_shape()) as engine:
        alone = [await step(from_engine(engine), batch) for batch in BATCHES]
    rows = [
        [*through, *own[1:], float(through[1]) / float(own[1])]  # type: ignore[arg-type]
        for through, own in zip(routed, alone, strict=True)
    ]
    table(("batch", "through gRPC, mean ms", "p50", "p99", "the engine's own, mean", "p50", "p99", "ratio"), rows)
    print(f"Times between tokens, contexts of about {CONTEXT} tokens, greedy.")


if __name__ == "__main__":
    uvloop.run(main())
