"""Invalid handoffs are refused by field, before anything is reserved or read."""

from collections.abc import Callable

import pytest
from support.clients.worker_calls import decode_request
from support.cluster.workers import LEASE_SECONDS, Running, Starter
from support.eventually import PATIENCE_SECONDS, eventually

from baton.calls import unary
from baton.engine.v1 import handoff_pb2
from baton.errors import HandoffLost, InvalidRequest, LayoutMismatch, LoraMismatch, StaleEpoch

Forge = Callable[[handoff_pb2.KvHandoff], None]


def _beyond(handoff: handoff_pb2.KvHandoff) -> None:
    handoff.block_ids[3] = 64


def _far_beyond(handoff: handoff_pb2.KvHandoff) -> None:
    handoff.block_ids[0] = 2**32 - 1


def _twice(handoff: handoff_pb2.KvHandoff) -> None:
    handoff.block_ids[2] = handoff.block_ids[1]


def _one_block_more(handoff: handoff_pb2.KvHandoff) -> None:
    handoff.block_ids.append(9)


def _more_tokens(handoff: handoff_pb2.KvHandoff) -> None:
    handoff.num_tokens = 2**63


def _a_token_less(handoff: handoff_pb2.KvHandoff) -> None:
    handoff.num_tokens -= 1


def _more_bytes(handoff: handoff_pb2.KvHandoff) -> None:
    handoff.num_bytes = 2**60


def _no_id(handoff: handoff_pb2.KvHandoff) -> None:
    handoff.handoff_id = ""


def _no_address(handoff: handoff_pb2.KvHandoff) -> None:
    handoff.address = ""


FORGERIES: list[tuple[Forge, str]] = [
    (_beyond, "handoff.block_ids[3]"),
    (_far_beyond, "handoff.block_ids[0]"),
    (_twice, "handoff.block_ids[2]"),
    (_one_block_more, "handoff.num_tokens"),
    (_more_tokens, "handoff.num_tokens"),
    (_a_token_less, "handoff.num_tokens"),
    (_more_bytes, "handoff.num_bytes"),
    (_no_id, "handoff.handoff_id"),
    (_no_address, "handoff.address"),
]


@pytest.mark.parametrize(("forge", "field"), FORGERIES)
async def test_a_number_that_cannot_be_right_is_refused_by_name(
    prefill: Running, decode: Running, forge: Forge, field: str
) -> None:
    handoff = await prefill.calls.prefill()
    forge(handoff)
    with pytest.raises(InvalidRequest) as refused:
        await decode.calls.decode(decode_request(handoff))
    assert field in [violation.field for violation in refused.value.violations]


async def test_a_refused_handoff_is_released_at_once(prefill: Running, decode: Running) -> None:
    handoff = await prefill.calls.prefill()
    _beyond(handoff)
    with pytest.raises(InvalidRequest):
        await decode.calls.decode(decode_request(handoff))
    await eventually(lambda: prefill.blocks_used == 0, LEASE_SECONDS / 2)


async def test_a_first_token_that_was_not_emitted_is_refused(prefill: Running, decode: Running) -> None:
    handoff = await prefill.calls.prefill()
    with pytest.raises(InvalidRequest, match=r"handoff\.num_tokens"):
        await decode.calls.decode(decode_request(handoff, emitted=[1]))


async def test_another_layout_is_refused_naming_both_digests(prefill: Running, start: Starter) -> None:
    async with start("decode", block_tokens=8) as decode:
        handoff = await prefill.calls.prefill()
        with pytest.raises(LayoutMismatch) as refused:
            await decode.calls.decode(decode_request(handoff))
        assert handoff.layout_digest in refused.value.message
        assert decode.worker.engine.facts.layout.digest in refused.value.message


async def test_kv_of_an_adapter_is_refused_for_a_request_without_it(prefill: Running, decode: Running) -> None:
    handoff = await prefill.calls.prefill()
    handoff.lora_digest = "f" * 64
    with pytest.raises(LoraMismatch, match="computed with an adapter of content ffff"):
        await decode.calls.decode(decode_request(handoff))
    # Sooner than its lease ends.
    await eventually(lambda: prefill.blocks_used == 0, LEASE_SECONDS / 2)


async def test_the_owner_refuses_readers_of_another_layout_naming_both_digests(prefill: Running) -> None:
    request = handoff_pb2.GetPoolRequest(epoch=prefill.worker.epoch, layout_digest="theirs")
    with pytest.raises(LayoutMismatch, match="theirs") as refused:
        await unary(prefill.calls.handoffs.GetPool(request, timeout=PATIENCE_SECONDS))
    assert prefill.worker.engine.facts.layout.digest in refused.value.message


async def test_a_handoff_of_another_epoch_is_stale(prefill: Running, decode: Running) -> None:
    handoff = await prefill.calls.prefill()
    handoff.epoch += 1
    with pytest.raises(StaleEpoch):
        await decode.calls.decode(decode_request(handoff))


@pytest.mark.parametrize("method", ["release", "renew"])
async def test_the_owner_answers_no_other_epoch(prefill: Running, method: str) -> None:
    handoff = await prefill.calls.prefill()
    handoff.epoch += 1
    with pytest.raises(StaleEpoch):
        await getattr(prefill.calls, method)(handoff)


async def test_an_invented_handoff_id_is_lost(prefill: Running, decode: Running) -> None:
    handoff = await prefill.calls.prefill()
    handoff.handoff_id = "A" * 32
    with pytest.raises(HandoffLost):
        await decode.calls.decode(decode_request(handoff))
    assert len(prefill.worker.leases) == 1


async def test_somebody_elses_blocks_are_noticed_before_they_are_decoded(prefill: Running, decode: Running) -> None:
    mine = await prefill.calls.prefill("mine")
    theirs = await prefill.calls.prefill("theirs", b"t" * 50)
    mine.block_ids[:] = theirs.block_ids
    with pytest.raises(Exception, match="does not belong to this prompt"):
        await decode.calls.decode(decode_request(mine))
