"""The cost of a request before it is validated: fields are counted, compression is refused or bounded."""

import gzip
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from grpc import StatusCode, aio
from hypothesis import given, settings
from hypothesis import strategies as st
from support.many_fields import EMPTY, TOO_MANY, field
from support.memory import peak_memory
from support.servers.scripted_router import NAME, raw, scripted, status_of

from baton.error_details import from_rpc_error
from baton.errors import InvalidRequest, Unsupported
from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1 import model_pb2, tokenize_pb2
from rpc.interceptors.counting import TextLimits, count_fields
from rpc.interceptors.reading import MalformedRequest, Reader, ReadLimits
from rpc.server import ConnectionLimits

MIB = 2**20
MOST = 65_536


async def never(request: object, context: object) -> None:
    raise AssertionError("a request that is refused must not reach the servicer")


@pytest.fixture
def reader() -> Iterator[Reader]:
    with ThreadPoolExecutor(1) as threads:
        yield Reader(ReadLimits(64 * MIB, MOST), threads)


@pytest.mark.parametrize("name", TOO_MANY)
async def test_more_fields_than_can_be_looked_at_are_refused_by_their_name(name: str) -> None:
    async with scripted(Generate=never) as peer:
        status = await status_of(raw(peer.channel, "Generate", streams=True)(TOO_MANY[name]))
    assert status.code() is StatusCode.INVALID_ARGUMENT
    error = from_rpc_error(status)
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == name


async def test_a_message_of_a_clients_stream_has_the_same_limit() -> None:
    async with scripted(Generate=never) as peer:
        call = peer.channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")()
        await call.write(TOO_MANY["request"])
        await call.done_writing()
        assert await call.code() is StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("name", TOO_MANY)
def test_too_many_fields_are_never_parsed(name: str) -> None:
    with peak_memory() as peak, pytest.raises(InvalidRequest):
        count_fields(pb.GenerateRequest.DESCRIPTOR, TOO_MANY[name], MOST)
    assert peak.megabytes < 8


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
@pytest.mark.parametrize("size", [4 * MIB, 64 * MIB])
async def test_the_memory_of_a_large_request_is_given_back_where_it_is_read(size: int) -> None:
    prompt = "x" * (size - 100)
    wire = bytearray(pb.GenerateRequest(prompt=prompt).SerializeToString())
    asked: list[pb.GenerateRequest | MalformedRequest] = []

    async def keep(request: Any, _context: object) -> None:
        asked.append(request)

    most = TextLimits(8 * MIB, 8 * MIB)
    with ThreadPoolExecutor(1) as threads:
        reader = Reader(ReadLimits(64 * MIB, MOST), threads, lambda _: most)
        deserialize = reader.deserializer(pb.GenerateRequest.FromString)
        assert deserialize is not None
        await reader.read("Generate", keep)(deserialize(wire), None)  # type: ignore[arg-type]
    assert wire.count(b"x") < 10_000  # within its first and its last page
    if size < most.each:
        assert isinstance(asked[0], pb.GenerateRequest)
        assert asked[0].prompt == prompt
    else:
        assert isinstance(asked[0], MalformedRequest)


def test_large_contents_count_as_one_field() -> None:
    message = pb.GenerateRequest(prompt="x" * MIB, media=[{"data": bytes(4 * MIB)}])
    assert count_fields(pb.GenerateRequest.DESCRIPTOR, message.SerializeToString(), 10)


def test_a_million_token_ids_pass() -> None:
    wire = pb.GenerateRequest(token_ids={"ids": [100_000] * 10**6}).SerializeToString()
    assert count_fields(pb.GenerateRequest.DESCRIPTOR, wire, MOST)


def test_a_long_chat_passes() -> None:
    messages = [{"role": "user", "parts": [{"text": "a turn"}]}] * 10_000
    assert count_fields(pb.ChatInput.DESCRIPTOR, pb.ChatInput(messages=messages).SerializeToString(), MOST)


def test_what_counting_cannot_follow_is_not_parsed() -> None:
    # In a group, which the parser skips as unknown, a known number may stand for something else.
    group = b"\x9b\x07" + field(5, b"\xff") + b"\x9c\x07"
    assert not count_fields(pb.GenerateRequest.DESCRIPTOR, group + field(5, EMPTY * 100), 10)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_bytes_that_counting_takes_for_malformed_are_no_message_of_ours(wire: bytes) -> None:
    try:
        well_formed = count_fields(pb.GenerateRequest.DESCRIPTOR, wire, MOST)
        message = pb.GenerateRequest.FromString(wire)
    except DecodeError:
        return
    assert well_formed or any(byte & 7 in (3, 4) for byte in wire), message


async def test_a_large_request_arrives_whole() -> None:
    async def echo(request: pb.GenerateRequest, context: Any) -> None:
        await context.write(pb.GenerateResponse(request_id=request.request_id, sequence=len(request.prompt)))

    async with scripted(Generate=echo) as peer:
        request = pb.GenerateRequest(request_id="large", prompt="é" * MIB)
        [answer] = [answer async for answer in peer.stub.Generate(request, timeout=60)]
    assert (answer.request_id, answer.sequence) == ("large", MIB)


# Compression.


def model_named(length: int) -> model_pb2.GetModelRequest:
    return model_pb2.GetModelRequest(name="x" * length)


async def name_length(request: model_pb2.GetModelRequest, context: object) -> model_pb2.GetModelResponse:
    return model_pb2.GetModelResponse(model=model_pb2.Model(name=str(len(request.name))))


async def compressed(peer: Any, wire: bytes, algorithm: grpc.Compression) -> aio.AioRpcError:
    call = peer.channel.unary_unary(f"/{NAME}/GetModel")(wire, compression=algorithm, timeout=60)
    return await status_of(call)


async def test_a_compressed_request_is_refused_and_the_connection_goes_on() -> None:
    async with scripted(GetModel=name_length) as peer:
        status = await compressed(peer, model_named(MIB).SerializeToString(), grpc.Compression.Gzip)
        assert status.code() is StatusCode.UNIMPLEMENTED
        assert status.details() == "compressed requests are not accepted here; send the request without compression"
        assert (await peer.stub.GetModel(model_named(5))).model.name == "5"


def test_a_bomb_is_not_decompressed(reader: Reader) -> None:
    malformed, megabytes = read_bomb(reader)
    assert isinstance(malformed.error, Unsupported)
    assert megabytes < 8


def test_where_gzip_is_accepted_a_bomb_is_decompressed_up_to_the_limit_of_a_message() -> None:
    with ThreadPoolExecutor(1) as threads:
        malformed, megabytes = read_bomb(Reader(ReadLimits(MIB, MOST, accepts_gzip=True), threads))
    assert malformed.error.message == f"request: is larger than {MIB} bytes when it is decompressed"
    assert megabytes < 8


def read_bomb(reader: Reader) -> tuple[Any, float]:
    """The outcome of 400 KB that stand for 400 MB, and the memory that it took."""
    squeezer = zlib.compressobj(wbits=31)
    bomb = b"".join(squeezer.compress(bytes(MIB)) for _ in range(400)) + squeezer.flush()
    deserialize = reader.deserializer(model_pb2.GetModelRequest.FromString)
    assert deserialize is not None
    with peak_memory() as peak:
        malformed = deserialize(bomb).read()
    return malformed, peak.megabytes


async def test_deflate_is_refused() -> None:
    async with scripted(GetModel=name_length) as peer:
        status = await compressed(peer, model_named(1000).SerializeToString(), grpc.Compression.Deflate)
    assert status.code() is StatusCode.UNIMPLEMENTED


async def test_gzip_is_accepted_where_it_is_switched_on() -> None:
    async with scripted(GetModel=name_length, connections=ConnectionLimits(compressed_requests=True)) as peer:
        request = model_named(100_000)
        answer = await peer.stub.GetModel(request, compression=grpc.Compression.Gzip, timeout=60)
    assert answer.model.name == "100000"


@pytest.mark.parametrize(
    ("wire", "problem"),
    [(gzip.compress(b"x" * 1000)[:-4], "is truncated gzip"), (b"\x1f\x8b" + bytes(50), "is not valid gzip")],
    ids=["truncated", "not gzip"],
)
def test_gzip_that_is_broken_is_refused(wire: bytes, problem: str) -> None:
    with ThreadPoolExecutor(1) as threads:
        accepting = Reader(ReadLimits(MIB, MOST, accepts_gzip=True), threads)
        deserialize = accepting.deserializer(tokenize_pb2.TokenizeRequest.FromString)
        assert deserialize is not None
        malformed = deserialize(wire).read()
    assert isinstance(malformed, MalformedRequest)
    assert malformed.error.message == f"request: {problem}"


# Texts.

MEDIA = frozenset({"baton.inference.v1.MediaItem.data", "baton.inference.v1.MediaItem.uri"})
TEXTS = TextLimits(each=1000, together=1500, media=MEDIA, media_bytes=3000)
TOO_LONG: dict[str, bytes] = {
    "prompt": pb.GenerateRequest(prompt="x" * 1001).SerializeToString(),
    "chat.messages.parts.text": pb.GenerateRequest(
        chat={"messages": [{"parts": [{"text": "x" * 800}, {"text": "x" * 800}]}]}
    ).SerializeToString(),
    "guided.json_schema": pb.GenerateRequest(guided={"json_schema": "日" * 1001}).SerializeToString(),
    "media.data": pb.GenerateRequest(media=[{"data": bytes(3001)}]).SerializeToString(),
    "chat.messages.parts.media.uri": pb.GenerateRequest(
        chat={"messages": [{"parts": [{"media": {"uri": "x" * 3001}}]}]}
    ).SerializeToString(),
    "stopping.stop": field(7, field(3, b"x" * 100) * 16),
    "sampling.bad_words": field(
        6, pb.GenerateRequest(sampling={"bad_words": ["x" * 1600]}).sampling.SerializeToString()
    ),
    "request": field(14, bytes(1001)),  # a field that there is none of
    "lora_name": field(11, b"\x80" * 5000),  # no UTF-8, and no characters
}


@pytest.mark.parametrize("name", TOO_LONG)
def test_texts_that_no_model_takes_are_refused_by_their_name_and_never_parsed(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        count_fields(pb.GenerateRequest.DESCRIPTOR, TOO_LONG[name], MOST, TEXTS)
    assert refused.value.violations[0].field == name


def test_texts_are_counted_in_characters_and_media_apart() -> None:
    request = pb.GenerateRequest(prompt="日" * 1000, media=[{"data": bytes(3000)}] * 3, token_ids=None)
    assert count_fields(pb.GenerateRequest.DESCRIPTOR, request.SerializeToString(), MOST, TEXTS)
    ids = pb.GenerateRequest(token_ids={"ids": [5] * 5000}).SerializeToString()
    assert count_fields(pb.GenerateRequest.DESCRIPTOR, ids, MOST, TEXTS)
