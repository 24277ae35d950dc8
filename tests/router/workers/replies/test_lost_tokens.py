"""Tokens that are lost between a worker and its router: the answer ends with a status, and is not simply shorter."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from grpc import StatusCode, aio
from support.clients.scraping import since
from support.cluster.in_process import PREFILL, Bench, bench
from support.servers.broken_worker import LANES, LONG, beside
from support.servers.tampering import Reply

from baton.engine.v1 import decode_pb2
from baton.error_details import from_rpc_error
from baton.errors import TokensLost


def nth_token(number: int, change: Callable[[decode_pb2.DecodeResponse], Iterable[Reply]]) -> Callable[[Any], Any]:
    """Changes the message with the token of this number, counted on this worker from 1."""
    seen = 0

    def changed(reply: decode_pb2.DecodeResponse) -> Iterable[Reply]:
        nonlocal seen
        before, seen = seen, seen + len(reply.tokens.token_ids)
        return change(reply) if before < number <= seen else [reply]

    return changed


def lost(reply: decode_pb2.DecodeResponse) -> Iterable[Reply]:
    return []


async def error_of(running: Bench, **fields: Any) -> TokensLost:
    with pytest.raises(aio.AioRpcError) as caught:
        await running.generate(**{**LONG, **fields})
    assert caught.value.code() is StatusCode.DATA_LOSS
    error = from_rpc_error(caught.value)
    assert isinstance(error, TokensLost)
    return error


@LANES
@pytest.mark.parametrize("number", [1, 20, 59], ids=["first", "middle", "last"])
async def test_an_answer_with_a_gap_ends_with_data_loss(number: int, multiplexed: bool) -> None:
    faults = since("baton_router_worker_faults_total", stage="decode")
    async with bench(PREFILL) as running, beside(running, "decode", multiplexed=multiplexed) as broken:
        broken.changes["Decode"] = nth_token(number, lost)
        error = await error_of(running)
        assert error.message == "59 of the answer's 60 tokens have come"
        assert (error.worker_id, error.stage) == ("broken", "decode")
        broken.changes.clear()
        assert len((await running.generate(**LONG)).token_ids) == 60
    assert faults.grown == 1


async def test_a_gap_before_the_end_of_the_sequence_is_noticed() -> None:
    async with bench(PREFILL) as running, beside(running, "decode", multiplexed=True) as broken:
        whole = await running.generate(**LONG)
        broken.changes["Decode"] = nth_token(5, lost)
        # The router ends the answer itself, at the stop token.
        await error_of(running, stopping={"max_tokens": 60, "stop_token_ids": [whole.token_ids[30]]})


async def test_a_worker_of_a_version_before_that_does_not_count_is_believed() -> None:
    def uncounted(reply: decode_pb2.DecodeResponse) -> Iterable[Reply]:
        reply.finished.ClearField("num_tokens") if reply.HasField("finished") else None
        return [reply]

    async with bench(PREFILL) as running, beside(running, "decode", multiplexed=True) as older:
        older.changes["Decode"] = uncounted
        assert len((await running.generate(**LONG)).token_ids) == 60
