"""Shared streams whose peer breaks their rules: their calls fail with an error that says so, and nothing else does."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from baton.engine.v1 import decode_pb2
from baton.engine.v1 import multiplex_pb2 as pb
from baton.errors import BatonError, InvalidReply
from engine_protocol.multiplex.replies import MultiplexedCall
from engine_protocol.multiplex.running_calls import RunningCalls


class Link:
    """A stream that notes what its calls ask for."""

    def __init__(self) -> None:
        self.calls = RunningCalls()
        self.cancelled: list[int] = []

    def cancel(self, call: int) -> None:
        self.calls.forget(call)
        self.cancelled.append(call)

    def pause(self, call: int, *, is_paused: bool) -> None:
        del call, is_paused

    def set_sink(self, call: int, sink: Any) -> None:
        self.calls.set_sink(call, sink)

    def begin(self, number: int) -> MultiplexedCall[decode_pb2.DecodeResponse]:
        call = MultiplexedCall(number, self, decode_pb2.DecodeResponse.FromString, of_tokens, None)
        self.calls.add(number, call)
        return call


def of_tokens(token_ids: Sequence[int]) -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(tokens=decode_pb2.DecodedTokens(token_ids=token_ids))


def answer(call: int, message: bytes) -> pb.MultiplexResponse:
    return pb.MultiplexResponse(answers=[pb.CallAnswer(call=call, message=message)])


def status(call: int, code: int, trailers: Sequence[pb.CallMetadata] = ()) -> pb.MultiplexResponse:
    ended = pb.CallStatus(code=code, message="broken", trailers=trailers)
    return pb.MultiplexResponse(answers=[pb.CallAnswer(call=call, status=ended)])


@pytest.mark.parametrize(("calls", "tokens"), [([1, 1], [5]), ([1], [5, 6]), ([1], [])])
async def test_tokens_without_a_call_end_the_stream(calls: list[int], tokens: list[int]) -> None:
    link = Link()
    link.begin(1)
    response = pb.MultiplexResponse(token_calls=calls, token_ids=tokens)
    with pytest.raises(InvalidReply):
        link.calls.push(response)


async def test_an_answer_that_is_no_message_fails_its_call_alone() -> None:
    link = Link()
    broken, well = link.begin(1), link.begin(2)
    link.calls.push(answer(1, b"\xff\xff"))
    link.calls.push(answer(2, of_tokens([7]).SerializeToString()))
    with pytest.raises(InvalidReply, match="not a message"):
        await anext(broken)
    assert list((await anext(well)).tokens.token_ids) == [7]


async def test_a_peer_that_heeds_no_pause_loses_the_call() -> None:
    link = Link()
    call = link.begin(1)
    for _ in range(20_000):
        link.calls.push(pb.MultiplexResponse(token_calls=[1], token_ids=[5]))
    with pytest.raises(InvalidReply, match="paused"):
        await anext(call)
    assert link.cancelled == [1]


def kinds(kind: type[BatonError] = BatonError) -> Iterator[type[BatonError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from kinds(child)


def odd_details() -> Iterator[bytes]:
    """Statuses with details that fit nothing."""
    yield b"\xff\xff\xff"
    for kind in kinds():
        info = error_details_pb2.ErrorInfo(reason=kind.reason, domain="baton", metadata={"stage": "x" * 9999})
        retry = error_details_pb2.RetryInfo(retry_delay={"seconds": 2**63 - 1, "nanos": -(2**31)})
        details = [any_pb2.Any(type_url="/", value=b"x"), any_pb2.Any()]
        for one in (info, retry):
            details.append(any_pb2.Any())
            details[-1].Pack(one)
        yield status_pb2.Status(code=77, details=details).SerializeToString()


@pytest.mark.parametrize("code", [1, 2, 16, 17, 77, 2**32 - 1])
async def test_whatever_status_a_call_ends_with_it_is_an_error_of_ours(code: int) -> None:
    for number, details in enumerate(odd_details(), start=1):
        link = Link()
        call = link.begin(number)
        link.calls.push(status(number, code, [pb.CallMetadata(key="grpc-status-details-bin", value=details)]))
        await asyncio.sleep(0)
        with pytest.raises(BatonError):
            await anext(call)
