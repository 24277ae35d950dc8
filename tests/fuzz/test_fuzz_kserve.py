"""Random and malformed messages to KServe's protocol: each error says what is wrong, and none is our own fault.

A few hundred inputs here; `make fuzz`, or BATON_FUZZ_INPUTS, sends more.
"""

import json
import os
import struct
from collections.abc import Callable
from typing import Any

from google.protobuf.message_factory import GetMessageClass
from grpc import aio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.clients.fuzz_target import CALL_SECONDS, Target, check_error
from support.clients.random_messages import Known, mangled, messages

from baton.kserve import inference_pb2 as pb
from router.kserve.tensors import OUTPUTS, PARAMETERS
from runtime.aio import timeout

INPUTS = int(os.environ.get("BATON_FUZZ_INPUTS", "400"))
TESTS = 4

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
STREAM = f"/{SERVICE.full_name}/ModelStreamInfer"
KNOWN: Known = {
    "model_name": st.sampled_from(["", "simulated"]),
    "name": st.sampled_from(["text_input", "stream", "sampling_parameters", "simulated", "embedding", *OUTPUTS]),
    "datatype": st.sampled_from(["BYTES", "BOOL", "INT32"]),
}
fuzzed = settings(
    max_examples=max(1, INPUTS // TESTS),
    deadline=None,
    database=None,
    derandomize="BATON_FUZZ_INPUTS" not in os.environ,
    suppress_health_check=list(HealthCheck),
)

VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.sampled_from([0, 1, 2, 3, 2**32, 10**400, float("nan"), float("inf")])
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["[1]", '["a"]', '{"7": 1}', '{"tags": [{"begin": "<a>"}]}', "[" * 3000, "{}"])
    | st.lists(st.text(max_size=2) | st.integers(), max_size=3)
    | st.dictionaries(st.text(max_size=2), st.integers(), max_size=2)
)
NAMES = st.sampled_from([*PARAMETERS, "dimensions", "normalize", "x", "", "binary_data_output"])


@st.composite
def infer_requests(draw: Callable[..., Any]) -> pb.ModelInferRequest:
    """Requests that are almost right: inputs and parameters of known names, with any value."""
    made = pb.ModelInferRequest(model_name=draw(KNOWN["model_name"]), id=draw(st.sampled_from(["", "r"])))
    sampling = json.dumps(draw(st.dictionaries(NAMES, VALUES, max_size=3))).encode()
    packed = {
        "text_input": draw(st.sampled_from([b"hello", b"", b"\xff", b"x" * 400])),
        "stream": draw(st.sampled_from([b"\x00", b"\x01", b"", b"\x01\x01", b"\x07"])),
        "sampling_parameters": draw(st.sampled_from([sampling, b"", b"[]", b"[" * 3000, b'{"n": 1e999}'])),
    }
    is_raw = draw(st.booleans())
    for name in ["text_input", *draw(st.lists(st.sampled_from(["stream", "sampling_parameters", "x"]), max_size=2))]:
        is_bool = (name == "stream") != (draw(st.integers(0, 15)) == 0)
        tensor = made.inputs.add(name=name, datatype="BOOL" if is_bool else "BYTES", shape=[1])
        content = packed.get(name, b"")
        if is_raw:
            made.raw_input_contents.append(content if is_bool else struct.pack("<I", len(content)) + content)
        elif is_bool:
            tensor.contents.bool_contents.extend(bool(one) for one in content)
        else:
            tensor.contents.bytes_contents.append(content)
    made.parameters["max_tokens"].int64_param = 3
    for name in draw(st.lists(st.sampled_from([*OUTPUTS, "embedding"]), max_size=1)):
        made.outputs.add(name=name)
    for name in draw(st.lists(NAMES, max_size=3)):
        _set(made.parameters[name], draw(VALUES))
    return made


def _set(parameter: pb.InferParameter, value: object) -> None:
    match value:
        case bool():
            parameter.bool_param = value
        case int() if -(2**63) <= value < 2**63:
            parameter.int64_param = value
        case float():
            parameter.double_param = value
        case str():
            parameter.string_param = value


def send_stream(target: Target, wire: bytes) -> None:
    target.run(_send_stream(target.router, wire))


async def _send_stream(channel: aio.Channel, wire: bytes) -> None:
    """Sends one request in a stream of its own. An error is a message, with its reason."""
    call = channel.stream_stream(STREAM, None, pb.ModelStreamInferResponse.FromString)(timeout=CALL_SECONDS)
    try:
        await call.write(wire)
        await call.done_writing()
        async with timeout(CALL_SECONDS + 5):
            async for message in call:
                if message.error_message:
                    assert message.error_message.startswith("["), message
                    assert "INTERNAL" not in message.error_message, message
    except aio.AioRpcError as error:
        check_error(error)
    finally:
        call.cancel()


def unary_calls() -> st.SearchStrategy[tuple[str, bytes]]:
    methods = [method for method in SERVICE.methods if method.name != "ModelStreamInfer"]
    return st.sampled_from(methods).flatmap(
        lambda method: st.tuples(
            st.just(f"/{SERVICE.full_name}/{method.name}"),
            messages(GetMessageClass(method.input_type), KNOWN).map(lambda one: one.SerializeToString())
            | mangled(messages(GetMessageClass(method.input_type), KNOWN)),
        )
    )


@fuzzed
@given(call=unary_calls())
def test_clients_may_send_any_message(target: Target, call: tuple[str, bytes]) -> None:
    target.send(target.router, *call)


@fuzzed
@given(request=infer_requests())
def test_an_almost_right_request_is_answered_or_refused(target: Target, request: pb.ModelInferRequest) -> None:
    target.send(target.router, f"/{SERVICE.full_name}/ModelInfer", request.SerializeToString())


@fuzzed
@given(request=infer_requests())
def test_an_almost_right_request_in_a_stream(target: Target, request: pb.ModelInferRequest) -> None:
    send_stream(target, request.SerializeToString())


@fuzzed
@given(wire=mangled(infer_requests()) | mangled(messages(pb.ModelInferRequest, KNOWN)))
def test_any_bytes_in_a_stream(target: Target, wire: bytes) -> None:
    send_stream(target, wire)


def test_after_all_that_it_still_works(target: Target) -> None:
    target.still_works()
