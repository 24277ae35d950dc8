"""Workers that send more than was asked for, or what does not match: the client gets nothing of the rest."""

from collections.abc import Callable, Iterable
from typing import Any

import grpc
import pytest
from grpc import aio
from support.cluster.in_process import DECODE, PREFILL, bench, simulated
from support.servers.broken_worker import LANES, LONG, PATIENT, beside, router_for, tokens
from support.servers.tampering import SILENCE, Reply, tampered

from baton.engine.v1 import decode_pb2
from baton.inference.v1 import sampling_pb2


def only_yields(reply: decode_pb2.DecodeResponse) -> Iterable[Reply]:
    """No tokens, and in the place of the end that it yields."""
    return [decode_pb2.DecodeResponse(yielded=decode_pb2.DecodeYielded())] if reply.HasField("finished") else []


async def test_a_decode_that_yields_again_and_again_is_given_up() -> None:
    async with bench(router=PATIENT) as running, beside(running, "decode", multiplexed=True) as broken:
        broken.changes["Decode"] = only_yields
        with pytest.raises(aio.AioRpcError) as failed:
            await running.generate(**LONG)
        assert failed.value.code() is grpc.StatusCode.INTERNAL
        assert broken.calls["Decode"] < 10


def flood(reply: decode_pb2.DecodeResponse) -> Iterable[Reply]:
    """Each token, and many more after what may be the last one."""
    if reply.WhichOneof("event") == "finished":
        return [*(tokens(7) for _ in range(500)), tokens(*range(3, 200)), reply, tokens(8)]
    return [reply]


def at_once_too_many(reply: decode_pb2.DecodeResponse) -> Iterable[Reply]:
    """All further tokens, and many more, together."""
    match reply.WhichOneof("event"):
        case "tokens":
            return [tokens(*reply.tokens.token_ids, *[7] * 500)]
        case _:
            return [reply]


def no_end(reply: decode_pb2.DecodeResponse) -> Iterable[Reply]:
    """All tokens, and no end of the call."""
    return [SILENCE] if reply.HasField("finished") else [reply]


@LANES
@pytest.mark.parametrize("roles", [("decode",), ("prefill", "decode")], ids=["decode", "aggregated"])
@pytest.mark.parametrize("broken", [flood, at_once_too_many, no_end])
async def test_the_limits_of_a_request_hold_whatever_the_worker_sends(
    broken: Callable[[Any], Iterable[Reply]], roles: tuple[str, ...], multiplexed: bool
) -> None:
    workers = [] if len(roles) > 1 else [PREFILL]
    async with (
        bench(*workers, router=router_for("silence" if broken is no_end else "")) as running,
        tampered(running, simulated("broken", *roles), multiplexed=multiplexed) as worker,
    ):
        worker.changes["Decode"] = broken
        stream = await running.generate(**LONG)
    assert len(stream.token_ids) == 60
    assert stream.finished.usage.completion_tokens == 60
    assert stream.finished.reason == sampling_pb2.FINISH_REASON_LENGTH


@LANES
async def test_nothing_comes_after_an_end_of_sequence(multiplexed: bool) -> None:
    """The model's end of sequence is 256, at which a worker has to stop."""

    def past_the_end(reply: decode_pb2.DecodeResponse) -> Iterable[Reply]:
        if reply.WhichOneof("event") == "tokens":
            return [tokens(65), tokens(256), tokens(66), tokens(67, 68)]
        return [reply]

    async with (
        bench(PREFILL, router=PATIENT) as running,
        tampered(running, simulated("broken", "decode"), multiplexed=multiplexed) as worker,
    ):
        worker.changes["Decode"] = past_the_end
        stream = await running.generate(**LONG)
    assert stream.token_ids[1:] == [65, 256]
    assert stream.finished.reason == sampling_pb2.FINISH_REASON_END_OF_SEQUENCE


def without(reply: decode_pb2.DecodeResponse) -> None:
    del reply.tokens.logprobs[:]


def one_more(reply: decode_pb2.DecodeResponse) -> None:
    reply.tokens.logprobs.add(token_id=1)


def of_others(reply: decode_pb2.DecodeResponse) -> None:
    for one in reply.tokens.logprobs:
        one.token_id += 1


def not_numbers(reply: decode_pb2.DecodeResponse) -> None:
    for one in reply.tokens.logprobs:
        one.logprob = float("nan")


@LANES
@pytest.mark.parametrize("change", [without, one_more, of_others, not_numbers])
async def test_log_probabilities_that_do_not_match_their_tokens_are_a_failure(
    change: Callable[[decode_pb2.DecodeResponse], None], multiplexed: bool
) -> None:
    asked = {**LONG, "response": {"logprobs": 2}}

    def changed(reply: decode_pb2.DecodeResponse) -> Iterable[Reply]:
        if reply.WhichOneof("event") == "tokens":
            change(reply)
        return [reply]

    async with bench(PREFILL, DECODE, router=PATIENT) as running:
        expected = await running.generate(**asked)
        async with beside(running, "decode", multiplexed=multiplexed) as broken:
            broken.changes["Decode"] = changed
            while not broken.calls["Decode"]:
                stream = await running.generate(**asked)
                assert stream.token_ids == expected.token_ids
            assert stream.placed == ("p1", "d1")
            assert [one.token_id for m in stream.messages for one in m.token.logprobs] == stream.token_ids
