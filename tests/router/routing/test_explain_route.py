"""ExplainRoute: where a request would run, and why."""

import grpc
import pytest
from support.cluster.in_process import FAST_ROUTER, PATIENT, Bench, bench, simulated

from baton.inference.v1 import cluster_service_pb2, generate_pb2, sampling_pb2
from router.config import RouterConfig, RoutingConfig

PREDICTED: RouterConfig = PATIENT.model_copy(update={"routing": RoutingConfig(policy="predicted_seconds")})
IDS = list(range(200))


def request(**fields: object) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(token_ids=generate_pb2.TokenIds(ids=IDS), **fields)  # type: ignore[arg-type]


async def explain(running: Bench, asked: generate_pb2.GenerateRequest) -> cluster_service_pb2.ExplainRouteResponse:
    return await running.operators.ExplainRoute(cluster_service_pb2.ExplainRouteRequest(request=asked))


async def test_it_shows_the_terms_of_each_candidate_and_they_add_up() -> None:
    workers = (simulated("p1", "prefill"), simulated("p2", "prefill"), simulated("d1", "decode"))
    async with bench(*workers, router=PREDICTED) as running:
        routing = generate_pb2.RoutingOptions(topology=generate_pb2.TOPOLOGY_DISAGGREGATED)
        stopping = sampling_pb2.StoppingOptions(max_tokens=1)
        stream = running.stub.Generate(request(routing=routing, stopping=stopping))
        place = [message async for message in stream][-1].finished.prefill_worker_id
        explained = await explain(running, request())
        assert (explained.policy, explained.prompt_tokens) == ("predicted_seconds", len(IDS))
        seen = {(each.prefill_worker_id, each.decode_worker_id): each for each in explained.candidates}
        assert seen.keys() == {("", "d1"), ("p1", "d1"), ("p2", "d1")}
        assert (seen[place, "d1"].cached_tokens, seen[place, "d1"].uncached_tokens) == (192, 8)
        for each in explained.candidates:
            terms = each.wait_seconds + each.prefill_seconds + each.transfer_seconds
            assert each.total_seconds == pytest.approx(terms + each.decode_seconds + each.stall_seconds)
            assert each.cached_tokens + each.uncached_tokens == len(IDS)
            assert each.has_kv_events
        totals = [each.total_seconds for each in explained.candidates]
        assert totals == sorted(totals)


async def test_it_says_who_is_left_out_and_why() -> None:
    async with bench(simulated("d1", "decode", max_context_tokens=100), simulated("d2", "decode")) as running:
        explained = await explain(running, request())
    assert explained.policy == FAST_ROUTER.routing.policy
    assert not explained.candidates
    assert "decode d1: its context ends at 100 tokens" in explained.workers


async def test_a_request_that_cannot_be_run_is_refused_as_generate_would() -> None:
    async with bench(simulated("d1", "decode")) as running:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await explain(running, generate_pb2.GenerateRequest(model="other", prompt="a"))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
