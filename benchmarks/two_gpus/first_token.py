"""The first tokens of long prompts through gRPC, beside their prefill: does the handoff, or anything else, delay them?

    python -m benchmarks.two_gpus.first_token [--rounds 20] [--transports nixl]

Prefill on GPU 0, decode on GPU 1, routers and this client, each a process of its own; one request at a time. The
router sends the first token as soon as prefill has sampled it; the handoff comes after it, before the second one, or
begins while the prompt is computed where that is long enough. For these, two routers with the same workers take turns,
one of which never begins early.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop
from transformers import LlamaConfig

from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc, timing_pb2
from baton.inference.v1.sampling_pb2 import SamplingParams, StoppingOptions
from benchmarks.gpu_transfer import TINY
from benchmarks.two_gpus.cluster import EARLY_TOKENS, cluster
from benchmarks.two_gpus.model import big_shape
from benchmarks.two_gpus.report import table
from benchmarks.two_gpus.serving import LONG, SHORT, prompt_of
from router.telemetry.stages import name_of
from rpc.channels import open_channel

LONGEST = 400 if TINY else 16_000
WARM_UPS = 3

_PREFILL = (timing_pb2.STAGE_PREFILL_QUEUE, timing_pb2.STAGE_PREFILL_COMPUTE)
_OUTSIDE = ("admission", "tokenize", "route", "unattributed", "detokenize")


@dataclass(frozen=True, slots=True)
class Request:
    """Milliseconds: as the client saw the first two tokens, and of the ledger's stages."""

    first_token: float
    second_token: float  # after the first one
    prefill: float
    waiting: float  # for blocks of the decode worker
    transfer: float  # from the pull to its confirmation
    outside: dict[str, float]  # before the first token, by stage; `client` is what the router does not see
    transport: str


async def ask(stub: inference_service_pb2_grpc.InferenceServiceStub, ids: Sequence[int]) -> Request:
    request = generate_pb2.GenerateRequest(
        token_ids=generate_pb2.TokenIds(ids=ids),
        sampling=SamplingParams(temperature=0.0),
        stopping=StoppingOptions(max_tokens=8, ignore_eos=True),
        routing=generate_pb2.RoutingOptions(topology=generate_pb2.TOPOLOGY_DISAGGREGATED),
    )
    sent, times = time.perf_counter(), []
    finished = generate_pb2.Finished()
    async for message in stub.Generate(request, timeout=120):
        if message.HasField("token"):
            times += [time.perf_counter()] * len(message.token.token_ids)
        if message.HasField("finished"):
            finished = message.finished
    first_token = (times[0] - sent) * 1e3
    stages: dict[str, float] = {}
    for timing in finished.timings:
        name = name_of(timing.stage)
        stages[name] = stages.get(name, 0.0) + timing.before_first_token.ToNanoseconds() / 1e6
    outside = {name: stages.get(name, 0.0) for name in _OUTSIDE}
    return Request(
        first_token=first_token,
        second_token=(times[1] - times[0]) * 1e3,
        prefill=_milliseconds(finished, _PREFILL),
        waiting=_milliseconds(finished, [timing_pb2.STAGE_HANDOFF_WAIT]),
        transfer=_milliseconds(finished, [timing_pb2.STAGE_HANDOFF_TRANSFER]),
        outside={**outside, "client": first_token - sum(stages.values())},
        transport=",".join(stage.transport for stage in finished.timings if stage.transport),
    )


def _milliseconds(finished: generate_pb2.Finished, stages: Sequence[int]) -> float:
    return sum(stage.duration.ToNanoseconds() / 1e6 for stage in finished.timings if stage.stage in stages)


def row(name: str, found: Sequence[Request]) -> list[object]:
    return [
        name,
        f"{statistics.median(one.first_token for one in found):.1f}",
        f"{statistics.median(one.prefill for one in found):.1f}",
        f"{statistics.median(one.first_token / one.prefill for one in found):.3f}",
        f"{statistics.median(one.first_token - one.prefill for one in found):.2f}",
        f"{statistics.median(one.second_token for one in found):.1f}",
        f"{statistics.median(one.waiting for one in found):.2f}",
        f"{statistics.median(one.transfer for one in found):.2f}",
        found[-1].transport,
    ]


async def prompts(rounds: int) -> list[list[object]]:
    """Prompts whose handoff comes after the first token. Prints what passes outside of prefill."""
    rows, outside = [], []
    async with cluster("1 prefill + 1 decode", big_shape()) as [address], open_channel(address) as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        for length in (SHORT, LONG):
            for seed in range(WARM_UPS + 2):
                await ask(stub, prompt_of(length, seed))
            found = [await ask(stub, prompt_of(length, 100 + seed)) for seed in range(rounds)]
            rows.append(row(f"{length:,}", found))
            medians = (statistics.median(one.outside[name] for one in found) for name in (*_OUTSIDE, "client"))
            outside.append([f"{length:,}", *(f"{median:.2f}" for median in medians)])
    table(["prompt, outside of prefill", *_OUTSIDE, "client"], outside)
    return rows


async def early(rounds: int, transports: tuple[str, ...]) -> list[list[object]]:
    """Long prompts whose handoff begins after the first token, and while they are computed."""
    names = (f"{LONGEST:,}, handed over after it", f"{LONGEST:,}, while it is computed")
    found: dict[str, list[Request]] = {name: [] for name in names}
    tokens = 0, min(EARLY_TOKENS, LONGEST // 2)
    async with (
        cluster("1 prefill + 1 decode", _long_shape(), transports=transports, early_tokens=tokens) as addresses,
        open_channel(addresses[0]) as after,
        open_channel(addresses[1]) as meanwhile,
    ):
        stubs = [inference_service_pb2_grpc.InferenceServiceStub(channel) for channel in (after, meanwhile)]
        for turn in range(WARM_UPS + rounds):
            for index, stub in enumerate(stubs):
                measured = await ask(stub, prompt_of(LONGEST, 1000 + 2 * turn + index))
                if turn >= WARM_UPS:
                    found[names[index]].append(measured)
    return [row(name, requests) for name, requests in found.items()]


def _long_shape() -> LlamaConfig:
    shape = big_shape()
    shape.max_position_embeddings = LONGEST + 1000
    return shape


async def main(rounds: int, transports: Sequence[str]) -> None:
    rows = await prompts(rounds)
    for transport in transports:
        rows += await early(max(3, rounds // 2), (transport,))
    heads = [
        "prompt",
        "TTFT",
        "prefill",
        "ratio",
        "outside",
        "to the second token",
        "of it waiting",
        "pull to confirmed",
        "by",
    ]
    table(heads, rows)
    print("Times in ms, medians; prefill, waiting and pull from the ledger of the request.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--transports", nargs="+", default=["shm" if TINY else "cuda_ipc", "tcp"])
    options = parser.parse_args()
    uvloop.run(main(options.rounds, options.transports))  # as the servers do
