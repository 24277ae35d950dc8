"""Random and malformed messages to every service: no crash, no hang, and each answer says what is wrong.

A few hundred inputs here; `make fuzz`, or BATON_FUZZ_INPUTS, sends more.
"""

import os
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.clients.fuzz_target import Target
from support.clients.random_messages import Known, mangled, messages

from baton.engine.v1 import decode_pb2, encode_pb2, handoff_pb2, prefill_pb2, worker_pb2
from baton.inference.v1 import cluster_service_pb2, inference_service_pb2

INPUTS = int(os.environ.get("BATON_FUZZ_INPUTS", "400"))
TESTS = 5

# The end of a worker is not to be fuzzed in the midst of everything else.
_LEFT_OUT = {"baton.engine.v1.WorkerService.Drain"}

KNOWN: Known = {
    "model": st.sampled_from(["", "simulated"]),
    "request_id": st.text(max_size=8) | st.sampled_from(["r", "s"]),
    "token_ids": st.integers(0, 255),
    "emitted": st.integers(0, 255),
    "ids": st.integers(0, 255),
    "max_tokens": st.integers(1, 20),
    "min_tokens": st.integers(0, 3),
    "worker_id": st.sampled_from(["prefill", "decode"]),
    "num_tokens": st.integers(1, 40),
    "block_ids": st.integers(0, 63),
    "n": st.just(1),
    "role": st.sampled_from(["user", "system"]),
    # Never a name that would have to be looked up.
    "address": st.sampled_from(["", "127.0.0.1:1", "127.0.0.1", "127.0.0.1:99999", "[::1]:1"]),
    "uri": st.sampled_from(["", "data:,", "data:image/png;base64,AAAA", "file:///etc/passwd", "http://127.0.0.1:1/"]),
}

fuzzed = settings(
    max_examples=max(1, INPUTS // TESTS),
    deadline=None,
    database=None,
    derandomize="BATON_FUZZ_INPUTS" not in os.environ,
    suppress_health_check=list(HealthCheck),
)


def methods(*modules: Any) -> list[MethodDescriptor]:
    services: Sequence[ServiceDescriptor] = [
        service for module in modules for service in module.DESCRIPTOR.services_by_name.values()
    ]
    return [method for service in services for method in service.methods if method.full_name not in _LEFT_OUT]


PUBLIC = methods(inference_service_pb2, cluster_service_pb2)
ENGINE = methods(encode_pb2, prefill_pb2, decode_pb2, handoff_pb2, worker_pb2)


def path(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def requests_of(method: MethodDescriptor) -> st.SearchStrategy[Message]:
    return messages(GetMessageClass(method.input_type), KNOWN)


def calls(of: Sequence[MethodDescriptor]) -> st.SearchStrategy[tuple[str, bytes]]:
    """A method and the bytes of a message that could be its request."""
    return st.sampled_from(of).flatmap(
        lambda method: st.tuples(st.just(path(method)), requests_of(method).map(lambda m: m.SerializeToString()))
    )


def mangled_calls(of: Sequence[MethodDescriptor]) -> st.SearchStrategy[tuple[str, bytes]]:
    return st.sampled_from(of).flatmap(lambda method: st.tuples(st.just(path(method)), mangled(requests_of(method))))


@fuzzed
@given(call=calls(PUBLIC) | calls([method for method in PUBLIC if method.name == "Generate"]))
def test_clients_may_send_any_message(target: Target, call: tuple[str, bytes]) -> None:
    target.send(target.router, *call)


@fuzzed
@given(call=mangled_calls(PUBLIC))
def test_clients_may_send_any_bytes(target: Target, call: tuple[str, bytes]) -> None:
    target.send(target.router, *call)


@fuzzed
@given(call=calls(ENGINE), to_prefill=st.booleans())
def test_routers_may_send_any_message(target: Target, call: tuple[str, bytes], to_prefill: bool) -> None:
    target.send(target.prefill if to_prefill else target.decode, *call)


@fuzzed
@given(call=mangled_calls(ENGINE), to_prefill=st.booleans())
def test_routers_may_send_any_bytes(target: Target, call: tuple[str, bytes], to_prefill: bool) -> None:
    target.send(target.prefill if to_prefill else target.decode, *call)


@fuzzed
@given(data=st.data())
def test_a_right_handoff_with_any_field_wrong_is_refused(target: Target, data: st.DataObject) -> None:
    """Random handoffs fail at the first check; these get past most of them."""
    request = prefill_pb2.PrefillRequest(request_id="p")
    request.prompt.token_ids.extend(data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=40)))
    request.sampling.stop.max_tokens = 5
    handoff = target.run(_prefill(target, request))
    decode = decode_pb2.DecodeRequest(request_id="d", handoff=handoff)
    decode.prompt.CopyFrom(request.prompt)
    decode.sampling.CopyFrom(request.sampling)
    decode.emitted.append(handoff.first_token.token_id)
    wrong = data.draw(messages(handoff_pb2.KvHandoff, KNOWN))
    field = data.draw(st.sampled_from([field.name for field in wrong.DESCRIPTOR.fields]))
    decode.handoff.ClearField(field)
    partial = handoff_pb2.KvHandoff()
    partial.CopyFrom(wrong)
    for other in wrong.DESCRIPTOR.fields:
        if other.name != field:
            partial.ClearField(other.name)
    decode.handoff.MergeFrom(partial)
    target.send(target.decode, "/baton.engine.v1.DecodeService/Decode", decode.SerializeToString())


async def _prefill(target: Target, request: prefill_pb2.PrefillRequest) -> handoff_pb2.KvHandoff:
    call = target.prefill.unary_unary(
        "/baton.engine.v1.PrefillService/Prefill",
        request_serializer=prefill_pb2.PrefillRequest.SerializeToString,
        response_deserializer=prefill_pb2.PrefillResponse.FromString,
    )
    response: prefill_pb2.PrefillResponse = await call(request, timeout=60)
    return response.handoff


def test_after_all_that_it_still_works(target: Target) -> None:
    target.still_works()
