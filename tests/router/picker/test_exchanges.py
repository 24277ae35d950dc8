"""The endpoint picker, spoken to as Envoy does: one stream for each HTTP request."""

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.cluster.behind_picker import HOSTS, PickedHosts, open_hosts
from support.eventually import PATIENCE_SECONDS, eventually
from support.lifetimes import in_one_task
from support.router.gateway import completion, endpoints, gateway, head, piece, subset

from baton.envoy import ext_proc_pb2 as pb
from baton.envoy import ext_proc_pb2_grpc
from baton.inference.v1 import generate_pb2
from rpc.channels import open_channel

in_shared_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hosts() -> AsyncIterator[PickedHosts]:
    """Each serves a model of its own, so that only one of them can run a request."""
    async with in_one_task(open_hosts(("first", "second"), max_body_bytes=100_000)) as running:
        yield running


@in_shared_loop
@pytest.mark.parametrize(("host", "model"), list(zip(HOSTS, ("first", "second"), strict=True)))
async def test_a_request_goes_to_the_router_beside_the_chosen_worker(hosts: PickedHosts, host: str, model: str) -> None:
    async with gateway(hosts) as stream:
        await stream.send(**head())
        first = endpoints(await stream.ask(**piece(completion(model))))
        assert first[0] == hosts.openai(host)
        assert set(first) == {hosts.openai(each) for each in HOSTS}


@in_shared_loop
async def test_in_full_duplex_the_body_comes_back_as_it_was_sent(hosts: PickedHosts) -> None:
    body = completion("second")
    async with gateway(hosts) as stream:
        await stream.send(**head())
        await stream.send(**piece(body[:10], end=False))
        await stream.send(**piece(body[10:]))
        assert endpoints(await stream.receive())[0] == hosts.openai(HOSTS[1])
        answers = [await stream.receive(), await stream.receive()]
    pieces = [each.request_body.response.body_mutation.streamed_response for each in answers]
    assert [(each.body, each.end_of_stream) for each in pieces] == [(body[:10], False), (body[10:], True)]


@in_shared_loop
async def test_a_body_may_end_with_trailers(hosts: PickedHosts) -> None:
    async with gateway(hosts) as stream:
        await stream.send(**head())
        await stream.send(**piece(completion("second"), end=False))
        named = await stream.ask(request_trailers=pb.HttpTrailers())
        assert endpoints(named)[0] == hosts.openai(HOSTS[1])
        assert (await stream.receive()).WhichOneof("response") == "request_body"
        assert (await stream.receive()).WhichOneof("response") == "request_trailers"


@in_shared_loop
@pytest.mark.parametrize("mode", [pb.BUFFERED, None])
async def test_a_buffered_body_is_answered_with_the_endpoints(hosts: PickedHosts, mode: int | None) -> None:
    async with gateway(hosts) as stream:
        begun = await stream.ask(**head(mode=mode))
        assert begun == pb.ProcessingResponse(request_headers=pb.HeadersResponse())
        named = await stream.ask(**piece(completion("second")))
    assert named.WhichOneof("response") == "request_body"
    assert endpoints(named)[0] == hosts.openai(HOSTS[1])


@in_shared_loop
@pytest.mark.parametrize("mode", [pb.NONE, pb.STREAMED])
async def test_a_head_that_is_sent_on_at_once_is_answered_without_the_body(hosts: PickedHosts, mode: int) -> None:
    async with gateway(hosts) as stream:
        assert len(endpoints(await stream.ask(**head(mode=mode)))) == 2
        answer = await stream.ask(**piece(completion("second")))
    assert answer == pb.ProcessingResponse(request_body=pb.BodyResponse())


@in_shared_loop
@pytest.mark.parametrize(
    "body", [b"{not json", b"", completion("no-such-model"), completion("second", "x" * 200_000), b"[]"]
)
async def test_what_cannot_be_placed_goes_to_a_router_which_says_why(hosts: PickedHosts, body: bytes) -> None:
    async with gateway(hosts) as stream:
        await stream.send(**head())
        assert set(endpoints(await stream.ask(**piece(body)))) == {hosts.openai(each) for each in HOSTS}


@in_shared_loop
async def test_a_body_beyond_the_limit_is_passed_on_as_it_comes(hosts: PickedHosts) -> None:
    async with gateway(hosts) as stream:
        await stream.send(**head())
        await stream.send(**piece(b"x" * 60_000, end=False))
        assert len(endpoints(await stream.ask(**piece(b"y" * 60_000, end=False)))) == 2
        for expected in (b"x", b"y"):
            passed = (await stream.receive()).request_body.response.body_mutation.streamed_response
            assert passed.body == expected * 60_000
        last = (await stream.ask(**piece(b"z"))).request_body.response.body_mutation.streamed_response
    assert (last.body, last.end_of_stream) == (b"z", True)


@in_shared_loop
async def test_a_request_without_a_body_is_answered_at_once(hosts: PickedHosts) -> None:
    async with gateway(hosts) as stream:
        assert len(endpoints(await stream.ask(**head("/v1/models", end_of_stream=True)))) == 2


@in_shared_loop
async def test_a_grpc_request_goes_to_the_port_of_grpc(hosts: PickedHosts) -> None:
    message = generate_pb2.GenerateRequest(model="second", prompt="one two").SerializeToString()
    frame = b"\0" + len(message).to_bytes(4, "big") + message
    async with gateway(hosts) as stream:
        path = "/baton.inference.v1.InferenceService/Generate"
        await stream.send(**head(path, content_type="application/grpc+proto"))
        assert endpoints(await stream.ask(**piece(frame)))[0] == hosts.grpc(HOSTS[1])


@in_shared_loop
async def test_only_endpoints_that_the_gateway_allows_are_named(hosts: PickedHosts) -> None:
    async with gateway(hosts) as stream:
        await stream.send(**head(**subset([hosts.openai(HOSTS[0])])))
        # That host does not serve the model, which its router will say.
        assert endpoints(await stream.ask(**piece(completion("second")))) == [hosts.openai(HOSTS[0])]


@in_shared_loop
@pytest.mark.parametrize("allowed", [[], ["192.0.2.1:8000"]])
async def test_without_an_allowed_endpoint_the_answer_is_503(hosts: PickedHosts, allowed: list[str]) -> None:
    async with gateway(hosts) as stream:
        await stream.send(**head(**subset(allowed)))
        refused = (await stream.ask(**piece(completion("second")))).immediate_response
    assert refused.status.code == 503
    assert json.loads(refused.body)["error"]["code"] == "no_worker"


@in_shared_loop
async def test_without_an_allowed_endpoint_a_grpc_call_is_unavailable(hosts: PickedHosts) -> None:
    async with gateway(hosts) as stream:
        message = head("/baton.inference.v1.InferenceService/Generate", content_type="application/grpc", **subset([]))
        await stream.send(**message)
        refused = (await stream.ask(**piece(b""))).immediate_response
    assert refused.grpc_status.status == grpc.StatusCode.UNAVAILABLE.value[0]


@in_shared_loop
async def test_an_answer_passes_unchanged(hosts: PickedHosts) -> None:
    async with gateway(hosts) as stream:
        await stream.send(**head())
        await stream.ask(**piece(completion("second")))
        await stream.receive()
        begun = await stream.ask(response_headers=pb.HttpHeaders())
        body = await stream.ask(response_body=pb.HttpBody(body=b"token", end_of_stream=False))
        end = await stream.ask(response_trailers=pb.HttpTrailers())
    assert begun == pb.ProcessingResponse(response_headers=pb.HeadersResponse())
    assert body.response_body.response.body_mutation.streamed_response.body == b"token"
    assert end == pb.ProcessingResponse(response_trailers=pb.TrailersResponse())


@in_shared_loop
async def test_a_request_is_load_of_its_worker_until_the_gateway_has_done_with_it(hosts: PickedHosts) -> None:
    (worker,) = [each for each in hosts.picker.cluster.workers if each.record.model == "second"]
    meanwhile = set()
    # A report of the worker, which does not know of the request, may come at any time; not each time.
    for _ in range(20):
        async with gateway(hosts) as stream:
            await stream.send(**head())
            await stream.ask(**piece(completion("second")))
            meanwhile.add(worker.requests)
        await eventually(lambda: worker.requests == 0)
    assert 1 in meanwhile


@in_shared_loop
@pytest.mark.parametrize(
    "messages",
    [
        [{}],
        [piece(b"x")],
        [{"response_headers": pb.HttpHeaders()}],
        [head(), head()],
    ],
)
async def test_messages_out_of_order_are_refused(hosts: PickedHosts, messages: list[dict[str, Any]]) -> None:
    async with open_channel(hosts.picker.picker_address) as channel:
        stub = ext_proc_pb2_grpc.ExternalProcessorStub(channel)
        call = stub.Process(iter([pb.ProcessingRequest(**each) for each in messages]), timeout=PATIENCE_SECONDS)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [each async for each in call]
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "request" in str(caught.value.details())


@in_shared_loop
async def test_its_health_is_that_of_the_protocol(hosts: PickedHosts) -> None:
    async with open_channel(hosts.picker.picker_address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_SECONDS)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_gateway_that_stalls_is_not_waited_for() -> None:
    async with open_hosts(body_seconds=0.2) as hosts, gateway(hosts) as stream:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.ask(**head())
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert "0.2 s" in str(caught.value.details())


async def test_fail_open_leaves_the_choice_to_the_gateway() -> None:
    async with open_hosts(failure="open") as hosts, gateway(hosts) as stream:
        await stream.send(**head(**subset([])))
        answer = await stream.ask(**piece(completion("demo")))
        assert answer == pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=pb.CommonResponse()))
        assert (await stream.receive()).WhichOneof("response") == "request_body"


async def test_a_choice_that_takes_too_long_is_made_by_load() -> None:
    async with open_hosts(pick_seconds=1e-6) as hosts, gateway(hosts) as stream:
        await stream.send(**head())
        assert len(endpoints(await stream.ask(**piece(completion("demo"))))) == 2
