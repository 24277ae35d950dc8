"""gRPC's page "gRPC over HTTP2": what a request may look like, and what its answer says."""

import gzip
import sys
import zlib
from typing import Any

import grpc
import pytest
from hyperframe.frame import DataFrame, HeadersFrame
from support.http2.peer import Answer, Peer, head, message, peer_of
from support.http2.server import echoing

from rpc.channels import open_channel
from rpc.health import Health
from rpc.server import ServerOptions, Service, serve

OK, CANCELLED, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND = 0, 1, 3, 4, 5
RESOURCE_EXHAUSTED, ABORTED, UNIMPLEMENTED, INTERNAL, DATA_LOSS = 8, 10, 12, 13, 15


async def asked(peer: Peer, headers: list[tuple[str, str]], body: bytes = message(b"hi")) -> Answer:
    await peer.send(HeadersFrame(1, peer.block(headers), flags=["END_HEADERS"]))
    await peer.send(DataFrame(1, body, flags=["END_STREAM"]))
    return await peer.ended(1)


async def answer_to(headers: list[tuple[str, str]], body: bytes = message(b"hi"), **limits: int) -> Answer:
    async with echoing(**limits) as server, peer_of(server.port) as peer:
        return await asked(peer, headers, body)


async def test_an_answer_has_headers_messages_and_trailers() -> None:
    answer = await answer_to(head("unary"))
    first, last = answer.headers
    assert (first[":status"], first["content-type"]) == ("200", "application/grpc")
    assert answer.data == message(b"hi")
    assert last == {"grpc-status": "0"}


async def test_a_call_that_fails_without_a_message_is_trailers_only() -> None:
    answer = await answer_to(head("abort"))
    (only,) = answer.headers
    assert only[":status"] == "200"
    assert only["grpc-status"] == str(DATA_LOSS)
    assert only["grpc-message"] == "lost: 100%25 of %C3%A9"
    assert (only["why"], only["why-bin"]) == ("asked", "AP8")


async def test_a_call_that_fails_after_a_message_says_so_in_trailers() -> None:
    answer = await answer_to(head("abort_late"))
    assert answer.messages == [b"first"]
    assert (answer.status, answer.headers[-1]["grpc-message"]) == (ABORTED, "second")


async def test_an_unknown_method_is_unimplemented() -> None:
    assert (await answer_to(head("missing"))).status == UNIMPLEMENTED


@pytest.mark.parametrize("path", ["/", "x", "/test.Echo", "/test.Echo/", "/test.Echo/unary/", "*", "/%00"])
async def test_a_path_that_is_no_method_is_unimplemented(path: str) -> None:
    assert (await answer_to(head("unary", path=path))).status == UNIMPLEMENTED


@pytest.mark.parametrize("kind", ["application/grpc", "application/grpc+proto", "application/grpc;charset=utf-8"])
async def test_grpcs_content_types_are_served(kind: str) -> None:
    assert (await answer_to(head("unary", content_type=kind))).status == OK


@pytest.mark.parametrize("kind", [None, "application/json", "application/grpc-web", "text/plain"])
async def test_another_content_type_is_415(kind: str | None) -> None:
    answer = await answer_to(head("unary", content_type=kind))
    assert answer.headers[0][":status"] == "415"
    assert answer.is_ended


async def test_another_method_than_post_is_405() -> None:
    answer = await answer_to(head("unary", method="GET"), b"")
    assert answer.headers[0][":status"] == "405"


async def test_a_request_without_te_is_served() -> None:
    assert (await answer_to(head("unary", te=None))).status == OK


# Deadlines.


@pytest.mark.parametrize("timeout", ["1n", "0S", "5m", "2000u"])
async def test_a_deadline_that_passes_ends_the_call(timeout: str) -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        answer = await asked(peer, head("hang", ("grpc-timeout", timeout)))
        assert answer.status == DEADLINE_EXCEEDED
        assert server.seen.cancelled == server.seen.started


async def test_a_deadline_that_has_passed_already_ends_the_call_before_it_begins() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        answer = await asked(peer, head("unary", grpc_timeout="0n"))
    assert (answer.status, answer.data, server.seen.started) == (DEADLINE_EXCEEDED, b"", 0)


@pytest.mark.parametrize("timeout", ["99999999H", "10S", "1M", "00000010S"])
async def test_a_long_deadline_is_taken(timeout: str) -> None:
    assert (await answer_to(head("unary", ("grpc-timeout", timeout)))).status == OK


@pytest.mark.parametrize("timeout", ["", "S", "10", "10s", "-1S", "1.5S", "100000000S", "1 S", "1SS"])
async def test_a_timeout_that_is_none_is_named(timeout: str) -> None:
    answer = await answer_to(head("unary", ("grpc-timeout", timeout)))
    assert answer.status == INVALID_ARGUMENT
    assert answer.headers[0]["grpc-message"].startswith("grpc-timeout: ")


# Metadata.


async def test_metadata_come_back_as_they_were_sent() -> None:
    answer = await answer_to(head("metadata", ("initial-a", "1"), ("trailing-b", "x y"), ("trailing-c-bin", "AAH/")))
    assert answer.headers[0]["initial-a"] == "1"
    assert answer.headers[-1]["trailing-b"] == "x y"
    assert answer.headers[-1]["trailing-c-bin"] == "AAH/"


@pytest.mark.parametrize(("sent", "seen"), [("YQ", [b"a"]), ("YQ==", [b"a"]), ("YQ,Yg==", [b"a", b"b"]), ("", [b""])])
async def test_binary_metadata_may_be_padded_and_listed(sent: str, seen: list[bytes]) -> None:
    answer = await answer_to(head("metadata", ("x-a-bin", sent)))
    assert answer.messages == [repr([("x-a-bin", each) for each in seen]).encode()]


async def test_binary_metadata_that_are_not_base64_are_named() -> None:
    answer = await answer_to(head("metadata", ("x-a-bin", "!")))
    assert (answer.status, "x-a-bin" in answer.headers[0]["grpc-message"]) == (INVALID_ARGUMENT, True)


async def test_a_key_that_comes_twice_keeps_both_values_in_order() -> None:
    answer = await answer_to(head("metadata", ("x-a", "1"), ("x-a", "2")))
    assert answer.messages == [b"[('x-a', '1'), ('x-a', '2')]"]


async def test_more_metadata_than_the_limit_refuse_the_call_and_not_the_connection() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        answer = await asked(peer, head("unary", ("x-a", "a" * 17_000)), b"")
        assert answer.status == RESOURCE_EXHAUSTED
        await peer.call(3, "unary", b"x")
        assert (await peer.ended(3)).status == OK


async def test_illegal_metadata_of_a_servicer_do_not_leave_the_call_without_a_status() -> None:
    assert (await answer_to(head("illegal_trailers"))).status == INTERNAL


# Messages.


async def test_a_message_may_come_byte_by_byte() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await peer.call(1, "gather", end=False)
        for byte in message(b"ab") + message(b"") + message(b"cd"):
            await peer.send(DataFrame(1, bytes([byte])))
        await peer.send(DataFrame(1, flags=["END_STREAM"]))
        assert (await peer.ended(1)).messages == [b"ab,,cd"]


async def test_several_messages_may_come_in_one_frame() -> None:
    body = message(b"ab") + message(b"") + message(b"cd")
    assert (await answer_to(head("bidi"), body)).messages == [b"ab", b"", b"cd"]


async def test_a_stream_is_answered_while_it_is_sent() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await peer.call(1, "bidi", b"ping", end=False)
        await peer.until(lambda: peer.answer(1).messages == [b"ping"])
        await peer.send(DataFrame(1, message(b"pong"), flags=["END_STREAM"]))
        assert (await peer.ended(1)).messages == [b"ping", b"pong"]


async def test_a_request_without_a_message_is_unimplemented() -> None:
    assert (await answer_to(head("unary"), b"")).status == UNIMPLEMENTED


async def test_a_request_stream_may_be_empty() -> None:
    assert (await answer_to(head("gather"), b"")).messages == [b""]


async def test_a_request_that_ends_within_a_message_is_internal() -> None:
    assert (await answer_to(head("unary"), message(b"abc")[:-1])).status == INTERNAL


@pytest.mark.parametrize("method", ["unary", "gather"])
async def test_a_message_over_the_limit_is_refused_as_soon_as_its_length_is_known(method: str) -> None:
    async with echoing(max_message_bytes=1000) as server, peer_of(server.port) as peer:
        await peer.send(HeadersFrame(1, peer.block(head(method)), flags=["END_HEADERS"]))
        await peer.send(DataFrame(1, (0).to_bytes(1, "big") + (1001).to_bytes(4, "big")))
        answer = await peer.ended(1)
        assert answer.status == RESOURCE_EXHAUSTED
        assert "larger than max (1001 vs. 1000)" in answer.headers[0]["grpc-message"]


async def test_a_message_at_the_limit_is_taken() -> None:
    assert (await answer_to(head("unary"), message(bytes(1000)), max_message_bytes=1000)).messages == [bytes(1000)]


async def test_flags_of_a_message_that_are_not_known_are_internal() -> None:
    assert (await answer_to(head("unary"), message(b"x", compressed=2))).status == INTERNAL


# Compression.


@pytest.mark.parametrize(("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
async def test_a_compressed_request_is_read(encoding: str, compress: object) -> None:
    for content in (b"hello", bytes(3_000_000)):
        body = message(compress(content), compressed=1)  # type: ignore[operator]
        async with echoing() as server, peer_of(server.port, INITIAL_WINDOW_SIZE=2**24) as peer:
            await peer.send(b"\0\0\4\x08\0\0\0\0\0" + (2**24).to_bytes(4, "big"))
            assert (await asked(peer, head("unary", ("grpc-encoding", encoding)), body)).messages == [content]


async def test_a_message_may_be_plain_though_an_encoding_is_named() -> None:
    assert (await answer_to(head("unary", ("grpc-encoding", "gzip")))).messages == [b"hi"]


async def test_a_compressed_message_without_an_encoding_is_internal() -> None:
    assert (await answer_to(head("unary"), message(b"x", compressed=1))).status == INTERNAL


async def test_another_encoding_is_unimplemented_and_the_known_ones_are_named() -> None:
    answer = await answer_to(head("unary", ("grpc-encoding", "snappy")), message(b"x", compressed=1))
    assert answer.status == UNIMPLEMENTED
    assert answer.headers[0]["grpc-accept-encoding"] == "identity,deflate,gzip"


async def test_compressed_requests_are_refused_where_they_are_not_accepted() -> None:
    body = message(gzip.compress(b"hello"), compressed=1)
    answer = await answer_to(head("unary", ("grpc-encoding", "gzip")), body, accepts_compression=False)
    assert answer.status == UNIMPLEMENTED
    plain = await answer_to(head("unary", ("grpc-encoding", "gzip")), message(b"hello"), accepts_compression=False)
    assert plain.status == OK


@pytest.mark.parametrize("content", [b"not gzip", gzip.compress(b"hello")[:-9], b""], ids=["other", "cut off", "empty"])
async def test_what_is_not_in_its_encoding_is_internal(content: bytes) -> None:
    assert (
        await answer_to(head("unary", ("grpc-encoding", "gzip")), message(content, compressed=1))
    ).status == INTERNAL


@pytest.mark.parametrize("size", [1001, 100_000, 4_000_000])
async def test_a_message_that_grows_over_the_limit_is_refused(size: int) -> None:
    body = message(gzip.compress(bytes(size)), compressed=1)
    answer = await answer_to(
        head("unary", ("grpc-encoding", "gzip")), body, max_message_bytes=1000 if size == 1001 else 50_000
    )
    assert answer.status == RESOURCE_EXHAUSTED


async def test_an_answer_is_compressed_for_who_understands_it() -> None:
    answer = await answer_to(head("compressed", ("grpc-accept-encoding", "identity, gzip")), message(b"a" * 1000))
    assert answer.headers[0]["grpc-encoding"] == "gzip"
    assert answer.data[0] == 1
    assert gzip.decompress(answer.messages[0]) == b"a" * 1000


async def test_an_answer_is_plain_for_who_does_not_understand_it() -> None:
    answer = await answer_to(head("compressed"), message(b"a" * 1000))
    assert "grpc-encoding" not in answer.headers[0]
    assert answer.messages == [b"a" * 1000]


# Ends.


async def test_a_status_that_was_set_is_sent_without_the_message() -> None:
    answer = await answer_to(head("set_code"))
    assert (answer.status, answer.data) == (NOT_FOUND, b"")
    assert answer.headers[-1]["grpc-message"] == "it is not there"


@pytest.mark.parametrize("method", ["fail", "no_answer"])
async def test_an_unexpected_error_is_internal_and_says_nothing_of_itself(method: str) -> None:
    answer = await answer_to(head(method))
    assert answer.status == INTERNAL
    assert "secret" not in str(answer.headers)


@pytest.mark.parametrize("method", ["fail", "no_answer", "illegal_trailers"])
async def test_an_error_without_interceptors_has_a_status_too(method: str) -> None:
    async with echoing(wrappers=()) as server, peer_of(server.port) as peer:
        assert (await asked(peer, head(method))).status == INTERNAL


async def test_a_servicer_that_cancels_itself_does_not_leave_the_call_without_a_status() -> None:
    # The errors interceptor answers it, except on Python 3.10, which cannot tell it from a cancelled call.
    assert (await answer_to(head("cancel_itself"))).status == (INTERNAL if sys.version_info >= (3, 11) else CANCELLED)


async def test_a_large_request_is_parsed_from_the_buffer_that_it_was_received_in() -> None:
    """A copy would hold the interpreter's lock for tens of milliseconds."""
    size = 3 * 2**20
    buffers: list[tuple[type, int]] = []

    def parse(wire: bytes | bytearray) -> bytes:
        buffers.append((type(wire), wire.count(b"x")))
        return b""

    async def answer(request: bytes, context: Any) -> bytes:
        return request

    def add(_servicer: object, server: Any) -> None:
        method = grpc.unary_unary_rpc_method_handler(answer, request_deserializer=parse)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Parsing", {"Parse": method})])

    service = Service("test.Parsing", add, None)
    async with (
        serve(
            "127.0.0.1:0", [service], health=Health(), drain_seconds=0, options=ServerOptions(kind="http2")
        ) as server,
        open_channel(server.address) as channel,
    ):
        assert await channel.unary_unary("/test.Parsing/Parse")(b"x" * size, timeout=60) == b""
    assert buffers == [(bytearray, size)]
