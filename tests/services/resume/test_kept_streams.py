"""Kept decodes: they outlive their readers, are taken over exactly, refuse strangers, and end in time."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import pytest
from support.clients.scraping import since
from support.clients.worker_calls import decode_request
from support.cluster.workers import Running, Starter
from support.eventually import eventually
from support.lifetimes import in_one_task

from baton.calls import stream, unary
from baton.engine.v1 import decode_pb2
from baton.errors import BatonError, PositionInvalid, StaleAttempt, StreamAdopted, StreamLost, Unavailable
from runtime.aio import timeout
from services.config import KeepConfig

_GRACE_SECONDS = 1.0
_SECRET = b"s" * 16
_OWNER = sha256(b"owner").digest()


@dataclass
class Reading:
    """The messages of one reader."""

    ids: list[int] = field(default_factory=list)
    attached: decode_pb2.DecodeAttached | None = None
    finished: decode_pb2.DecodeFinished | None = None
    error: BatonError | None = None


def _request(name: str, tokens: int = 60, emitted: tuple[int, ...] = ()) -> decode_pb2.DecodeRequest:
    request = decode_request(request_id=name)
    request.sampling.stop.max_tokens = tokens
    request.sampling.stop.ignore_eos = True
    request.sampling.params.seed = 7
    request.emitted.extend(emitted)
    return request


def _kept(name: str, tokens: int = 60, grace: float = _GRACE_SECONDS) -> decode_pb2.DecodeRequest:
    request = _request(name, tokens)
    request.keep.secret_sha256 = sha256(_SECRET).digest()
    request.keep.owner_sha256 = _OWNER
    request.keep.record = b"record"
    request.keep.hop = 1
    request.keep.grace.FromNanoseconds(int(grace * 1e9))
    return request


def _attach(name: str, attempt: int = 1, **fields: Any) -> decode_pb2.AttachRequest:
    given = {"secret": _SECRET, "owner_sha256": _OWNER, **fields}
    return decode_pb2.AttachRequest(request_id=name, attempt=attempt, **given)


def _other(name: str, tokens: int) -> decode_pb2.DecodeRequest:
    request = _request(name, tokens)
    request.prompt.token_ids[0] = 1  # it shares no block
    return request


async def _read(call: Any, reading: Reading, until: int = 10**6) -> Reading:
    try:
        async with aclosing(stream(call)) as responses:
            async for response in responses:
                match response.WhichOneof("event"):
                    case "attached":
                        reading.attached = response.attached
                    case "tokens":
                        reading.ids += response.tokens.token_ids
                    case "finished":
                        reading.finished = response.finished
                if len(reading.ids) >= until:
                    break
    except BatonError as error:
        reading.error = error
    return reading


async def _alone(decode: Running, tokens: int = 60) -> list[int]:
    whole = await _read(decode.calls.decodes.Decode(_request(secrets.token_hex(4), tokens)), Reading())
    assert whole.finished is not None
    return whole.ids


@pytest.fixture
async def decode(start: Starter) -> AsyncIterator[Running]:
    """A worker that takes a while for an answer. All blocks must be free when the last grace is over."""
    async with in_one_task(start("decode", decode_step_seconds=0.002)) as running:
        yield running
        await eventually(lambda: running.blocks_used == 0, _GRACE_SECONDS + 1)


@pytest.fixture(autouse=True)
async def _bounded() -> AsyncIterator[None]:
    async with timeout(30):
        yield


async def test_a_record_says_that_the_worker_keeps_streams(decode: Running) -> None:
    [record] = decode.registry.workers()
    assert "keeps_streams" in record.capabilities


@pytest.mark.parametrize("pause", [0.0, 0.3], ids=["at once", "late"])
@pytest.mark.parametrize("after", [1, 20])
async def test_a_lost_reader_is_followed_by_another_with_the_same_ids(
    decode: Running, pause: float, after: int
) -> None:
    expected = await _alone(decode)
    first = await _read(decode.calls.decodes.Decode(_kept("a")), Reading(), until=after)
    await asyncio.sleep(pause)
    second = await _read(decode.calls.decodes.Attach(_attach("a", from_tokens=after)), Reading())
    assert second.attached is not None
    assert second.finished is not None
    assert [*second.attached.token_ids, *second.ids] == expected
    assert list(second.attached.token_ids[: len(first.ids)]) == first.ids
    assert (second.attached.record, second.attached.hop, second.attached.attachment) == (b"record", 1, 2)
    assert second.attached.prompt == _kept("a").prompt


async def test_an_answer_that_has_ended_is_given_again(decode: Running) -> None:
    first = await _read(decode.calls.decodes.Decode(_kept("a")), Reading())
    second = await _read(decode.calls.decodes.Attach(_attach("a")), Reading())
    assert second.attached is not None
    assert (list(second.attached.token_ids), second.ids) == (first.ids, [])
    assert second.finished == first.finished


async def test_a_second_reader_fences_the_first_one_off(decode: Running) -> None:
    first = Reading()
    reading = asyncio.create_task(_read(decode.calls.decodes.Decode(_kept("a", 300)), first))
    await eventually(lambda: len(first.ids) > 3)
    second = await _read(decode.calls.decodes.Attach(_attach("a", from_tokens=1)), Reading())
    await reading
    assert isinstance(first.error, StreamAdopted)
    assert second.attached is not None
    assert [*second.attached.token_ids, *second.ids] == await _alone(decode, 300)
    assert first.ids == list(second.attached.token_ids[: len(first.ids)])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"secret": b"x" * 16}, StreamLost),
        ({"owner_sha256": bytes(32)}, StreamLost),
        ({"owner_sha256": b""}, StreamLost),
        ({"request_id": "another"}, StreamLost),
        ({"from_tokens": 1_000_000}, PositionInvalid),
    ],
)
async def test_a_refused_reader_disturbs_nobody(decode: Running, change: dict[str, Any], error: type) -> None:
    first = Reading()
    reading = asyncio.create_task(_read(decode.calls.decodes.Decode(_kept("a", 200)), first))
    await eventually(lambda: len(first.ids) > 3)
    request = _attach("a")
    for name, value in change.items():
        setattr(request, name, value)
    refused = await _read(decode.calls.decodes.Attach(request), Reading())
    assert isinstance(refused.error, error)
    await reading
    assert (first.error, first.ids) == (None, await _alone(decode, 200))


async def test_the_same_attempt_is_not_taken_twice(decode: Running) -> None:
    await _read(decode.calls.decodes.Decode(_kept("a")), Reading(), until=2)
    assert (await _read(decode.calls.decodes.Attach(_attach("a", 3)), Reading(), until=1)).error is None
    for attempt in (1, 3):
        assert isinstance(
            (await _read(decode.calls.decodes.Attach(_attach("a", attempt)), Reading())).error, StaleAttempt
        )


async def test_a_reader_that_counts_no_attempts_is_the_next_one(decode: Running) -> None:
    await _read(decode.calls.decodes.Decode(_kept("a")), Reading(), until=2)
    for attempt in (0, 0, 5, 0):
        assert (await _read(decode.calls.decodes.Attach(_attach("a", attempt)), Reading(), until=1)).error is None
    assert isinstance((await _read(decode.calls.decodes.Attach(_attach("a", 6)), Reading())).error, StaleAttempt)


async def test_ten_thousand_forged_handles_are_refused_and_disturb_nobody(decode: Running) -> None:
    first = Reading()
    reading = asyncio.create_task(_read(decode.calls.decodes.Decode(_kept("a", 400)), first))
    await eventually(lambda: len(first.ids) > 3)
    for number in range(10_000):
        forged = _attach("a" if number % 2 else secrets.token_hex(16), number + 1, peek=bool(number % 3))
        if number % 5:
            forged.secret = secrets.token_bytes(number % 40)
        else:
            forged.owner_sha256 = secrets.token_bytes(32)
        with pytest.raises(StreamLost):
            decode.worker.kept.authorized(forged)
    await reading
    assert (first.error, first.ids) == (None, await _alone(decode, 400))


async def test_a_look_changes_nothing(decode: Running) -> None:
    first = Reading()
    reading = asyncio.create_task(_read(decode.calls.decodes.Decode(_kept("a", 200)), first))
    await eventually(lambda: len(first.ids) > 3)
    look = await _read(decode.calls.decodes.Attach(_attach("a", peek=True)), Reading())
    await reading
    assert look.attached is not None
    assert (first.error, len(first.ids), look.attached.attachment) == (None, 200, 1)
    assert look.attached.token_ids
    assert not look.attached.HasField("prompt")  # which may be long, and nobody needs it


async def test_an_orphan_has_no_block_once_its_grace_is_over(decode: Running) -> None:
    dropped = since("baton_kept_streams_dropped_total", reason="grace")
    await _read(decode.calls.decodes.Decode(_kept("a", 900, grace=0.3)), Reading(), until=3)
    assert decode.blocks_used > 0
    await eventually(lambda: decode.blocks_used == 0)
    assert dropped.grown == 1
    assert isinstance((await _read(decode.calls.decodes.Attach(_attach("a")), Reading())).error, StreamLost)
    assert len(decode.worker.kept) == 0


async def test_a_settled_stream_generates_no_more_and_keeps_its_ids(decode: Running) -> None:
    first = await _read(decode.calls.decodes.Decode(_kept("a", 900)), Reading(), until=5)
    await unary(decode.calls.decodes.Settle(decode_pb2.SettleRequest(request_id="a", attachment=9)))
    assert decode.blocks_used > 0
    await unary(decode.calls.decodes.Settle(decode_pb2.SettleRequest(request_id="a", attachment=1)))
    await eventually(lambda: decode.blocks_used == 0)
    second = await _read(decode.calls.decodes.Attach(_attach("a")), Reading())
    assert second.attached is not None
    assert list(second.attached.token_ids[: len(first.ids)]) == first.ids
    assert second.error is not None
    forget = decode_pb2.SettleRequest(request_id="a", attachment=2, forget=True)
    await unary(decode.calls.decodes.Settle(forget))
    assert len(decode.worker.kept) == 0


async def test_streams_are_found_by_their_ids(decode: Running) -> None:
    await _read(decode.calls.decodes.Decode(_kept("a")), Reading())
    asked = decode_pb2.FindStreamsRequest(request_ids=["x", "a"])
    [found] = (await unary(decode.calls.decodes.FindStreams(asked))).found
    assert (found.request_id, found.hop, found.tokens) == ("a", 1, 60)


async def test_log_probabilities_follow_the_ids(decode: Running) -> None:
    request = _kept("a", 40)
    request.sampling.logprobs = 2
    await _read(decode.calls.decodes.Decode(request), Reading(), until=5)
    second = await _read(decode.calls.decodes.Attach(_attach("a", from_tokens=3)), Reading())
    assert second.attached is not None
    assert [one.token_id for one in second.attached.logprobs] == list(second.attached.token_ids[3:])
    assert len(second.attached.token_ids) + len(second.ids) == 40


async def test_ids_that_came_before_are_part_of_the_answer(decode: Running) -> None:
    request = _kept("a", 20)
    request.emitted.extend([65, 66])
    first = await _read(decode.calls.decodes.Decode(request), Reading())
    second = await _read(decode.calls.decodes.Attach(_attach("a", from_tokens=1)), Reading())
    assert second.attached is not None
    assert list(second.attached.token_ids) == [65, 66, *first.ids]
    assert second.attached.prompt == request.prompt


async def test_a_parked_stream_gives_way_to_requests_that_find_no_room(start: Starter) -> None:
    async with in_one_task(start("decode", decode_step_seconds=0.1, num_blocks=6)) as decode:
        await _read(decode.calls.decodes.Decode(_kept("a", 40, grace=20)), Reading(), until=2)
        assert (await _read(decode.calls.decodes.Decode(_other("b", 3)), Reading())).finished is not None
        [found] = (
            await unary(decode.calls.decodes.FindStreams(decode_pb2.FindStreamsRequest(request_ids=["a"])))
        ).found
        assert 2 <= found.tokens < 40
        lost = await _read(decode.calls.decodes.Attach(_attach("a")), Reading())
        assert lost.attached is not None
        assert isinstance(lost.error, Unavailable)


async def test_of_too_many_parked_streams_the_oldest_ends(start: Starter) -> None:
    keep = KeepConfig(max_parked=2)
    async with in_one_task(start("decode", decode_step_seconds=0.01, keep=keep)) as decode:
        for name in "abc":
            await _read(decode.calls.decodes.Decode(_kept(name, 100)), Reading(), until=1)
        asked = decode_pb2.FindStreamsRequest(request_ids=["a", "b", "c"])
        await eventually(lambda: len(decode.worker.kept) == 2)
        found = await unary(decode.calls.decodes.FindStreams(asked))
        assert [one.request_id for one in found.found] == ["b", "c"]
        await eventually(lambda: decode.blocks_used == 0, _GRACE_SECONDS + 1)


async def test_ended_streams_take_bounded_memory(start: Starter) -> None:
    async with in_one_task(start("decode", keep=KeepConfig(max_finished_bytes=4500))) as decode:
        for number in range(10):
            await _read(decode.calls.decodes.Decode(_kept(str(number), 10, grace=30)), Reading())
        assert len(decode.worker.kept) == 4


async def test_the_prompts_of_ended_streams_count(start: Starter) -> None:
    async with in_one_task(start("decode", keep=KeepConfig(max_finished_bytes=8000))) as decode:
        for number in range(4):
            request = _kept(str(number), 10, grace=30)
            request.prompt.token_ids.extend([200] * 900)
            found = await _read(decode.calls.decodes.Decode(request), Reading())
            assert found.error is None, found.error
        assert len(decode.worker.kept) == 2


async def test_a_worker_may_keep_none(start: Starter) -> None:
    async with in_one_task(start("decode", keep=KeepConfig(max_seconds=0))) as decode:
        [record] = decode.registry.workers()
        assert "keeps_streams" not in record.capabilities


async def test_the_deadline_holds_without_a_reader(decode: Running) -> None:
    call = decode.calls.decodes.Decode(_kept("a", 900, grace=20), timeout=0.5)
    await _read(call, Reading(), until=2)
    # Sooner than its grace ends.
    await eventually(lambda: decode.blocks_used == 0, 15.0)
    assert isinstance((await _read(decode.calls.decodes.Attach(_attach("a")), Reading())).error, StreamLost)


async def test_an_abort_ends_a_parked_stream(decode: Running) -> None:
    await _read(decode.calls.decodes.Decode(_kept("a", 900, grace=20)), Reading(), until=2)
    assert (await decode.calls.abort("a")).found
    assert decode.blocks_used == 0
    assert isinstance((await _read(decode.calls.decodes.Attach(_attach("a")), Reading())).error, StreamLost)
