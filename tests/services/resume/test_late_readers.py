"""A reader of an earlier decode asks something of its request's next one, which counts its readers from 1 again."""

from contextlib import aclosing, nullcontext
from hashlib import sha256
from typing import Any

import pytest
from support.clients.worker_calls import decode_request
from support.cluster.workers import Running, Starter
from support.lifetimes import in_one_task

from baton.calls import stream, unary
from baton.engine.v1 import decode_pb2
from baton.errors import Cancelled, StreamAdopted, StreamLost

_SECRET, _OWNER = b"s" * 16, sha256(b"owner").digest()
_EARLIER, _NOW = 2**63 + 1, 7


async def _begin(decode: Running, execution: int) -> None:
    request = decode_request(request_id="a")
    request.sampling.stop.max_tokens, request.sampling.stop.ignore_eos = 900, True
    request.keep.secret_sha256, request.keep.owner_sha256 = sha256(_SECRET).digest(), _OWNER
    request.keep.execution = execution
    request.keep.grace.FromSeconds(20)
    async with aclosing(stream(decode.calls.decodes.Decode(request))) as responses:
        await anext(responses)


async def _attach(decode: Running, **fields: Any) -> decode_pb2.DecodeAttached:
    asked = decode_pb2.AttachRequest(request_id="a", secret=_SECRET, owner_sha256=_OWNER, **fields)
    async with aclosing(stream(decode.calls.decodes.Attach(asked))) as responses:
        return (await anext(responses)).attached


@pytest.mark.parametrize("forget", [False, True])
async def test_an_earlier_decodes_reader_ends_nothing_of_the_next_one(start: Starter, *, forget: bool) -> None:
    async with in_one_task(start("decode", decode_step_seconds=0.01)) as decode:
        await _begin(decode, _EARLIER)
        await _begin(decode, _NOW)
        stubs = decode.calls.decodes
        late = {"request_id": "a", "attachment": 1, "execution": _EARLIER}
        assert not (await unary(stubs.Settle(decode_pb2.SettleRequest(forget=forget, **late)))).is_settled
        with pytest.raises(StreamAdopted):
            await unary(stubs.Yield(decode_pb2.YieldRequest(**late)))
        with pytest.raises(StreamAdopted):
            await unary(stubs.LendBlocks(decode_pb2.LendBlocksRequest(num_tokens=10, **late)))
        with pytest.raises(StreamAdopted):
            await _attach(decode, attachment=1, execution=_EARLIER)
        attached = await _attach(decode, peek=True)
        assert (attached.execution, attached.attachment, attached.is_over) == (_NOW, 1, False)
        own = decode_pb2.SettleRequest(request_id="a", attachment=1, execution=_NOW, forget=True)
        assert (await unary(stubs.Settle(own))).is_settled
        assert len(decode.worker.kept) == 0


@pytest.mark.parametrize("execution", [0, _NOW])
async def test_a_router_of_an_earlier_version_is_known_by_its_attachment(start: Starter, execution: int) -> None:
    async with in_one_task(start("decode", decode_step_seconds=0.01)) as decode:
        await _begin(decode, execution)
        assert (await _attach(decode, attachment=1)).attachment == 2
        settle = decode_pb2.SettleRequest(request_id="a", attachment=2)
        assert (await unary(decode.calls.decodes.Settle(settle))).is_settled


@pytest.mark.parametrize("wrong", [{"secret": b"t" * 16}, {"owner_sha256": b"t" * 32}, {"request_id": "b"}])
async def test_a_cancel_with_a_wrong_secret_or_owner_ends_nothing(start: Starter, wrong: dict[str, Any]) -> None:
    async with in_one_task(start("decode", decode_step_seconds=0.01)) as decode:
        await _begin(decode, _NOW)
        right = {"request_id": "a", "secret": _SECRET, "owner_sha256": _OWNER}
        # As its last reader, too: it is refused for its secret.
        asked = decode_pb2.SettleRequest(**{**right, **wrong}, attachment=1, forget=True)
        with pytest.raises(StreamLost):
            await unary(decode.calls.decodes.Settle(asked))
        assert not (await _attach(decode, peek=True)).is_over
        assert (await unary(decode.calls.decodes.Settle(decode_pb2.SettleRequest(**right)))).is_settled
        assert len(decode.worker.kept) == 0


@pytest.mark.parametrize("wrong", [{}, {"secret_sha256": b"t" * 32}, {"owner_sha256": b"t" * 32}])
async def test_a_decode_that_begins_after_its_answer_was_cancelled_is_refused(
    start: Starter, wrong: dict[str, Any]
) -> None:
    async with in_one_task(start("decode", decode_step_seconds=0.01)) as decode:
        right = {"secret_sha256": sha256(_SECRET).digest(), "owner_sha256": _OWNER}
        cancelled = decode_pb2.CancelledAnswer(**{**right, **wrong})
        await unary(decode.calls.decodes.FindStreams(decode_pb2.FindStreamsRequest(cancelled=[cancelled])))
        with nullcontext() if wrong else pytest.raises(Cancelled):
            await _begin(decode, _NOW)
        assert len(decode.worker.kept) == bool(wrong)
