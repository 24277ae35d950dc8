"""The first token of a long prompt through gRPC, beside its prefill: does the handoff, or anything else, delay it?

    python -m benchmarks.two_gpus.first_token [--rounds 20]

Prefill on GPU 0, decode on GPU 1, a router and this client, each a process of its own; one request at a time. The
router sends the first token as soon as prefill has sampled it; the handoff comes after it, before the second one.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc, timing_pb2
from baton.inference.v1.sampling_pb2 import SamplingParams, StoppingOptions
from benchmarks.two_gpus.model import big_shape, folder_of
from benchmarks.two_gpus.report import table
from benchmarks.two_gpus.serving import LONG, SHORT, cluster, prompt_of
from rpc.channels import open_channel

_PREFILL = (timing_pb2.STAGE_PREFILL_QUEUE, timing_pb2.STAGE_PREFILL_COMPUTE)
_HANDOFF = (timing_pb2.STAGE_HANDOFF_WAIT, timing_pb2.STAGE_HANDOFF_TRANSFER)


@dataclass(frozen=True, slots=True)
class Request:
    """Milliseconds: as the client saw the first two tokens, and of the ledger's stages."""

    first_token: float
    second_token: float  # after the first one
    prefill: float
    handoff: float
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
    return Request(
        first_token=(times[0] - sent) * 1e3,
        second_token=(times[1] - times[0]) * 1e3,
        prefill=_milliseconds(finished, _PREFILL),
        handoff=_milliseconds(finished, _HANDOFF),
        transport=",".join(stage.transport for stage in finished.timings if stage.transport),
    )


def _milliseconds(finished: generate_pb2.Finished, stages: Sequence[int]) -> float:
    return sum(stage.duration.ToNanoseconds() / 1e6 for stage in finished.timings if stage.stage in stages)


async def main(rounds: int) -> None:
    rows = []
    with folder_of(big_shape()) as folder:
        async with cluster("1 prefill + 1 decode", folder) as address, open_channel(address) as channel:
            stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
            for length in (SHORT, LONG):
                for seed in range(5):
                    await ask(stub, prompt_of(length, seed))
                found = [await ask(stub, prompt_of(length, 100 + seed)) for seed in range(rounds)]
                rows.append(
                    [
                        length,
                        f"{statistics.median(one.first_token for one in found):.1f}",
                        f"{statistics.median(one.prefill for one in found):.1f}",
                        f"{statistics.median(one.first_token / one.prefill for one in found):.3f}",
                        f"{statistics.median(one.second_token for one in found):.1f}",
                        f"{statistics.median(one.handoff for one in found):.2f}",
                        found[-1].transport,
                    ]
                )
    heads = ["prompt", "TTFT", "prefill (ledger)", "ratio", "to the second token", "of it the handoff", "by"]
    table(heads, rows)
    print("Times in ms, medians.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    uvloop.run(main(parser.parse_args().rounds))  # as the servers do
