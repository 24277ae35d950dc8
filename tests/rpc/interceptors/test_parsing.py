"""Requests that cannot be parsed: a typed error that names the field."""

import pytest
from google.protobuf.message import DecodeError, Message
from grpc import StatusCode
from hypothesis import given
from hypothesis import strategies as st
from support.servers.scripted_router import raw, scripted, status_of

from baton.engine.v1 import decode_pb2, handoff_pb2
from baton.error_details import from_rpc_error
from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1 import model_pb2
from rpc.interceptors.wire import find_fault

MARK = "MARK"


def broken(message: Message) -> bytes:
    """The message's bytes, with invalid UTF-8 of the same length where it says MARK."""
    wire = message.SerializeToString()
    assert MARK.encode() in wire
    return wire.replace(MARK.encode(), b"\xff\xfe\xfd\xfc")


async def never(request: object, context: object) -> None:
    raise AssertionError("a request that cannot be parsed must not reach the servicer")


def nested_role() -> pb.GenerateRequest:
    roles = ["user", "assistant", MARK]
    return pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role=role) for role in roles]))


def nested_text() -> pb.GenerateRequest:
    parts = [pb.ContentPart(text="fine"), pb.ContentPart(text=MARK)]
    return pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role="user", parts=parts)]))


def template_variable() -> pb.GenerateRequest:
    request = pb.GenerateRequest()
    request.chat.template_variables["language"] = MARK
    return request


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.GenerateRequest(prompt=MARK), "prompt"),
        (pb.GenerateRequest(model="demo", request_id=MARK), "request_id"),
        (nested_role(), "chat.messages[2].role"),
        (nested_text(), "chat.messages[0].parts[1].text"),
        (template_variable(), "chat.template_variables.fields[0].value.string_value"),
    ],
)
async def test_invalid_utf8_is_refused_by_the_name_of_its_field(message: Message, field: str) -> None:
    async with scripted(Generate=never) as peer:
        status = await status_of(raw(peer.channel, "Generate", streams=True)(broken(message)))
    assert status.code() is StatusCode.INVALID_ARGUMENT
    error = from_rpc_error(status)
    assert isinstance(error, InvalidRequest)
    assert [(v.field, v.description) for v in error.violations] == [(field, "is not valid UTF-8")]


async def test_a_unary_call_is_refused_in_the_same_way() -> None:
    wire = broken(model_pb2.GetModelRequest(name=MARK))
    async with scripted(GetModel=never) as peer:
        status = await status_of(raw(peer.channel, "GetModel", streams=False)(wire))
    assert (status.code(), status.details()) == (StatusCode.INVALID_ARGUMENT, "name: is not valid UTF-8")


async def test_a_message_that_is_cut_off_is_refused_by_the_name_of_its_last_field() -> None:
    wire = pb.GenerateRequest(prompt="a longer prompt").SerializeToString()[:-3]
    async with scripted(Generate=never) as peer:
        status = await status_of(raw(peer.channel, "Generate", streams=True)(wire))
    assert (status.code(), status.details()) == (StatusCode.INVALID_ARGUMENT, "prompt: is cut off")


async def test_a_server_goes_on_after_a_request_that_cannot_be_parsed() -> None:
    async def get_model(request: object, context: object) -> model_pb2.GetModelResponse:
        return model_pb2.GetModelResponse(model=model_pb2.Model(name="demo"))

    async with scripted(GetModel=get_model) as peer:
        await status_of(raw(peer.channel, "GetModel", streams=False)(b"\xff" * 100))
        assert (await peer.stub.GetModel(model_pb2.GetModelRequest())).model.name == "demo"


def test_a_fault_of_a_handoff_is_found_behind_its_packed_ids() -> None:
    handoff = handoff_pb2.KvHandoff(block_ids=range(1000), layout_digest=MARK)
    fault = find_fault(decode_pb2.DecodeRequest.DESCRIPTOR, broken(decode_pb2.DecodeRequest(handoff=handoff)))
    assert fault.field == "handoff.layout_digest"


def test_a_bomb_of_nested_messages_is_found_and_not_followed() -> None:
    wire = b""
    for _ in range(2000):
        wire = _field(5, _field(1, _field(2, wire)))  # Value.struct_value > Struct.fields > entry.value
    fault = find_fault(pb.ChatInput.DESCRIPTOR, _field(2, _field(1, _field(2, wire))))
    assert fault.description == "is nested too deeply"


def test_the_search_gives_up_in_a_long_message() -> None:
    fault = find_fault(pb.GenerateRequest.DESCRIPTOR, b"\x38\x01" * 1_000_000 + b"\xff")
    assert fault.field == "request"


@given(st.binary(max_size=200))
def test_any_bytes_that_protobuf_refuses_have_a_fault(wire: bytes) -> None:
    fault = find_fault(pb.GenerateRequest.DESCRIPTOR, wire)
    try:
        pb.GenerateRequest.FromString(wire)
    except DecodeError:
        assert fault.field
        assert fault.description


def _field(number: int, content: bytes) -> bytes:
    length, size = b"", len(content)
    while size > 0x7F:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content
