"""Peers of a newer version: every enum of protos/ with a number that has no name here, in whatever is received."""

from collections.abc import Iterable
from contextlib import aclosing, suppress
from typing import Any

import pytest
from google.protobuf.descriptor import MethodDescriptor
from support.clients.scraping import since
from support.cluster.in_process import FAST_ROUTER, Bench, bench, simulated
from support.images.simulated_workers import about, multimodal
from support.newer_versions import NEWER, Path, enum_paths, make_newer, methods, set_path
from support.servers.tampering import Ends, Reply, Tampered, tampered

from baton.calls import stream, unary
from baton.engine.v1 import decode_pb2, embed_pb2, encode_pb2, handoff_pb2, prefill_pb2, worker_pb2
from baton.enum_names import UNKNOWN, value_name
from baton.errors import InvalidRequest, Unsupported
from baton.inference.v1 import (
    cluster_service_pb2,
    cluster_service_pb2_grpc,
    generate_pb2,
    inference_service_pb2,
    inference_service_pb2_grpc,
    sampling_pb2,
    timing_pb2,
)
from baton.inference.v1 import (
    embed_pb2 as inference_embed_pb2,
)
from cli.timings import timings_table
from rpc.channels import open_channel

_WORKERS = (decode_pb2, embed_pb2, encode_pb2, handoff_pb2, prefill_pb2, worker_pb2)
_CLIENTS = (inference_service_pb2, cluster_service_pb2)


async def answers(running: Bench, **fields: Any) -> generate_pb2.Finished:
    request = {"prompt": "hello", "stopping": {"max_tokens": 4}, **fields}
    return (await running.generate(**request)).finished


@pytest.mark.parametrize("multiplexed", [False, True])
async def test_whatever_enum_a_newer_worker_sends_the_answer_is_ok(multiplexed: bool) -> None:
    seen: set[str] = set()

    def newer(broken: Tampered) -> None:
        broken.change_all = lambda message: make_newer(message, seen)

    roles = ("encode", "prefill", "decode")
    labels = {"model": "demo", "outcome": "failed", "reason": "INTERNAL_ERROR"}
    failed = [since("baton_router_requests_total", request_class=kind, **labels) for kind in ("short", "image")]
    async with bench(router=FAST_ROUTER) as running:
        async with (
            tampered(running, multimodal("one", *roles), multiplexed=multiplexed) as one,
            tampered(running, multimodal("two", *roles), multiplexed=multiplexed) as two,
        ):
            newer(one)
            newer(two)
            whole = await answers(running, routing={"topology": "TOPOLOGY_AGGREGATED"})
            assert whole.reason == NEWER or whole.usage.completion_tokens == 4
            assert NEWER in {timing.stage for timing in whole.timings}
            assert timings_table(whole.timings).row_count >= len(whole.timings)
            apart = await answers(running, routing={"topology": "TOPOLOGY_DISAGGREGATED"})
            assert apart.usage.completion_tokens == 4
            # The first token ends it: prefill says why.
            await answers(running, routing={"topology": "TOPOLOGY_DISAGGREGATED"}, stopping={"max_tokens": 1})
            await running.generate(**about(max_tokens=2))
            await running.list_workers()
        async with tampered(running, simulated("e", "embed"), multiplexed=False) as embedding:
            newer(embedding)
            request = inference_embed_pb2.EmbedRequest(inputs=[{"text": "one"}])
            assert len((await unary(running.stub.Embed(request, timeout=20))).embeddings) == 1
    assert not any(one.grown for one in failed)
    # Those that only an abort, a card with media, and KV in a tier have are the rest.
    sent = {path[-1].full_name for method in methods(_WORKERS) for path in enum_paths(method.output_type)}
    assert sent - seen <= {
        "baton.engine.v1.AbortResponse.stage",
        "baton.engine.v1.KvBlocksStored.tier",
        "baton.inference.v1.ModelCapabilities.modalities",
    }


def client_cases() -> list[Any]:
    return [
        pytest.param(method, path, id=f"{method.name}-{'.'.join(field.name for field in path)}")
        for method in methods(_CLIENTS)
        for path in enum_paths(method.input_type)
    ]


@pytest.mark.parametrize(("method", "path"), client_cases())
async def test_an_enum_of_a_newer_client_is_ignored_or_refused_by_name(method: MethodDescriptor, path: Path) -> None:
    stubs = (inference_service_pb2_grpc.InferenceServiceStub, cluster_service_pb2_grpc.ClusterServiceStub)
    request = method.input_type._concrete_class()
    inner = request.request if "request" in method.input_type.fields_by_name else request
    inner.prompt = "hello"
    if "stopping" in inner.DESCRIPTOR.fields_by_name:
        inner.stopping.max_tokens = 2
    set_path(request, path)
    worker = multimodal("w", "encode", "prefill", "decode")
    async with bench(worker) as running, open_channel(running.address) as channel:
        [call] = [getattr(each(channel), method.name) for each in stubs if hasattr(each(channel), method.name)]
        with suppress(InvalidRequest, Unsupported):
            if method.server_streaming:
                async with aclosing(stream(call(request, timeout=20))) as found:
                    assert [one async for one in found]
            else:
                await unary(call(request, timeout=20))


def test_unknown_values_have_one_name() -> None:
    assert value_name(sampling_pb2.FinishReason, NEWER) == value_name(timing_pb2.Stage, -5) == UNKNOWN
    assert value_name(sampling_pb2.FinishReason, sampling_pb2.FINISH_REASON_END_OF_SEQUENCE) == "end_of_sequence"
    assert value_name(timing_pb2.Stage, 0) == "unspecified"


def ends_early(reply: decode_pb2.DecodeResponse) -> Iterable[Reply]:
    """The worker ends the answer after its first token, for a reason of its own."""
    if reply.WhichOneof("event") != "tokens":
        return [reply]
    end = decode_pb2.DecodeFinished(reason=NEWER, timings=[{"stage": NEWER}])
    return [reply, decode_pb2.DecodeResponse(finished=end), Ends(0)]


async def test_an_unknown_reason_and_an_unknown_stage_are_counted_under_one_label() -> None:
    labels = {"model": "demo", "request_class": "short"}
    ended = since("baton_router_requests_total", outcome="ok", reason="UNKNOWN", **labels)
    stages = since("baton_router_stage_seconds_count", stage=UNKNOWN, **labels)
    async with bench() as running, tampered(running, simulated("w", "decode"), multiplexed=True) as worker:
        worker.changes["Decode"] = ends_early
        assert (await answers(running)).reason == NEWER
    assert (ended.grown, stages.grown) == (1, 1)
