"""A hostile router sends names and digests of any length: a worker keeps none that is longer than it has to be."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.clients.worker_calls import WorkerCalls, decode_request, prompt, sampling
from support.cluster.workers import Running
from support.eventually import PATIENCE_SECONDS

from baton.calls import unary
from baton.engine.v1 import decode_pb2, handoff_pb2, prefill_pb2
from baton.errors import InvalidRequest

LONG = "x" * 65_536
DIGEST = b"d" * 32

Act = Callable[[WorkerCalls], Awaitable[Any]]


def _found(answer: dict[str, bytes]) -> Act:
    request = decode_pb2.FindStreamsRequest(cancelled=[_digests(), _digests(**answer)])
    return lambda calls: unary(calls.decodes.FindStreams(request, timeout=PATIENCE_SECONDS))


def _digests(**others: bytes) -> decode_pb2.CancelledAnswer:
    return decode_pb2.CancelledAnswer(**{"secret_sha256": DIGEST, "owner_sha256": DIGEST, **others})


def _decode(**fields: Any) -> Act:
    request = decode_request()
    request.MergeFrom(decode_pb2.DecodeRequest(**fields))
    return lambda calls: calls.decode(request)


def _kept(**others: bytes) -> Act:
    return _decode(keep={"secret_sha256": DIGEST, "owner_sha256": DIGEST, "grace": {"seconds": 1}, **others})


def _handed_over(**fields: str) -> Act:
    handoff = {"handoff_id": "id", "address": "127.0.0.1:1", "worker_id": "w", **fields}
    return _decode(handoff=handoff)


def _yielded(readers: int) -> Act:
    request = decode_pb2.YieldRequest(request_id="none", readers=[LONG] * readers)
    return lambda calls: unary(calls.decodes.Yield(request, timeout=PATIENCE_SECONDS))


DECODES: dict[str, Act] = {
    "cancelled[1].secret_sha256": _found({"secret_sha256": b"s" * 65_536}),
    "cancelled[1].owner_sha256": _found({"owner_sha256": b""}),
    "keep.secret_sha256": _kept(secret_sha256=b"s" * 33),
    "keep.owner_sha256": _kept(owner_sha256=b"o" * 65_536),
    "keep.record": _kept(record=bytes(2**20)),
    "request_id": _decode(request_id=LONG),
    "prompt.cache.session": _decode(prompt={"cache": {"session": LONG.encode()}}),
    "prompt.cache.parent_session": _decode(prompt={"cache": {"session": b"s", "parent_session": LONG.encode()}}),
    "prompt.cache.tenant": _decode(prompt={"cache": {"tenant": LONG.encode(), "retain_milliseconds": 1}}),
    "handoff.handoff_id": _handed_over(handoff_id=LONG),
    "handoff.address": _handed_over(address=LONG),
    "handoff.worker_id": _handed_over(worker_id=LONG),
    "readers": _yielded(17),
}


@pytest.mark.parametrize("field", DECODES)
async def test_a_decode_worker_refuses_what_is_too_long_and_names_the_field(decode: Running, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await DECODES[field](decode.calls)
    assert [one.field for one in caught.value.violations] == [field]
    assert not len(decode.worker.kept)


async def test_a_prefill_worker_refuses_a_reader_whose_name_is_too_long(prefill: Running) -> None:
    request = prefill_pb2.PrefillRequest(request_id="r", prompt=prompt(b"text"), sampling=sampling(4), reader=LONG)
    with pytest.raises(InvalidRequest, match="reader"):
        await unary(prefill.calls.prefills.Prefill(request, timeout=PATIENCE_SECONDS))
    assert not prefill.blocks_held


async def test_a_handoff_stays_held_where_a_reader_with_too_long_a_name_ends_or_claims_it(prefill: Running) -> None:
    handoff = await prefill.calls.prefill()
    release = handoff_pb2.ReleaseRequest(handoff_id=handoff.handoff_id, epoch=handoff.epoch, reader=LONG)
    renew = handoff_pb2.RenewRequest(
        handoff_ids=[handoff.handoff_id], epoch=handoff.epoch, claim=handoff_pb2.HandoffClaim(reader=LONG)
    )
    with pytest.raises(InvalidRequest, match="reader"):
        await unary(prefill.calls.handoffs.Release(release, timeout=PATIENCE_SECONDS))
    with pytest.raises(InvalidRequest, match=r"claim\.reader"):
        await unary(prefill.calls.handoffs.Renew(renew, timeout=PATIENCE_SECONDS))
    assert prefill.blocks_held == len(handoff.block_ids)
