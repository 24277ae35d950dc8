"""The memory of kept answers, and the time at which it is freed."""

import asyncio
import gc
import math
import os
import sys
import tracemalloc
import weakref
from contextvars import ContextVar, copy_context
from functools import partial
from hashlib import sha256

from support.eventually import eventually

from baton.engine.v1 import decode_pb2
from services.config import KeepConfig
from services.engines.answer import PromptLogprobs, Tokens
from services.engines.base import EngineLoad
from services.engines.journal.journal import Journal, RecoveredDecode
from services.engines.journal.slots import SlotShape
from services.resume.graces import TICK_SECONDS, Graces
from services.resume.stream import KeptRequest, KeptStream
from services.resume.streams import KeptStreams
from services.resume.takeover import LeftStream

_ANSWERS = 300
# That of a plain request by gRPC.
_RECORD_BYTES = 145


def _no_load() -> EngineLoad:
    raise AssertionError("nothing is parked")


def _kept(name: str, grace: int) -> decode_pb2.DecodeRequest:
    request = decode_pb2.DecodeRequest(request_id=name)
    request.prompt.token_ids.extend(range(300, 310))
    request.keep.secret_sha256 = request.keep.owner_sha256 = sha256(b"secret").digest()
    request.keep.grace.FromSeconds(grace)
    return request


async def _generate(tokens: int, stream: KeptStream) -> None:
    stream.accept(decode_pb2.DecodeResponse(accepted=decode_pb2.DecodeAccepted()))
    stream.add(Tokens(range(tokens)))
    stream.finish(decode_pb2.DecodeResponse(finished=decode_pb2.DecodeFinished()))


def _middle_of_a_tick() -> float:
    """A time in a minute at which nothing but a late loop lets kept answers go in two ticks instead of one."""
    return (math.floor((asyncio.get_running_loop().time() + 60) / TICK_SECONDS) + 0.5) * TICK_SECONDS


async def _answer(kept: KeptStreams, number: int, tokens: int, goes_at: float) -> None:
    request = decode_pb2.DecodeRequest(request_id=f"{number:036d}")
    request.prompt.token_ids.extend(range(300, 556))
    request.keep.secret_sha256 = sha256(b"%d" % number).digest()
    request.keep.owner_sha256 = sha256(b"owner %d" % number).digest()
    request.keep.record = number.to_bytes(_RECORD_BYTES, "big")
    request.keep.grace.FromNanoseconds(int((goes_at - asyncio.get_running_loop().time()) * 1e9))
    stream = await kept.start(request, partial(_generate, tokens), 60.0)
    with kept.reading(stream, 0):
        await eventually(lambda: stream.has_ended)


async def _taken(kept: KeptStreams, tokens: int) -> float:
    """The bytes that Python takes for each further answer that has ended, beside its prompt.

    All go at one time: each tick takes 0.5 KB, and a busy machine needs more of them for as many answers.
    """
    goes_at = _middle_of_a_tick()
    await _answer(kept, 0, tokens, goes_at)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(1, _ANSWERS + 1):
            await _answer(kept, number, tokens, goes_at)
        gc.collect()
        taken = (tracemalloc.get_traced_memory()[0] - before) / _ANSWERS
    finally:
        tracemalloc.stop()
    assert len(kept) == _ANSWERS + 1
    return taken - sys.getsizeof(kept.streams[0].kept.prompt)


async def test_an_ended_answer_takes_a_kibibyte_and_four_bytes_a_token_as_is_counted() -> None:
    for tokens in (2, 402):
        async with KeptStreams(KeepConfig(), _no_load) as kept:
            taken, counted = await _taken(kept, tokens), kept.streams[0].size
            assert taken < 1024 + 4 * tokens
            assert 0.9 * counted < taken < 1.1 * counted


async def test_items_of_a_tick_go_together_but_for_those_that_are_cancelled() -> None:
    ended: list[str] = []
    graces: Graces[str] = Graces(ended.append, copy_context())
    began = asyncio.get_running_loop().time()
    ticks = {name: graces.begin(name, 0.3) for name in ("a", "b", "c")}
    graces.cancel("b", ticks["b"])
    later = graces.begin("d", 600.0)
    await eventually(lambda: sorted(ended) == ["a", "c"])
    assert asyncio.get_running_loop().time() - began > 0.29
    graces.cancel("a", ticks["a"])  # which has gone
    graces.cancel("d", later)
    assert not graces._ticks


async def test_an_item_may_go_while_another_one_does() -> None:
    ended: list[str] = []

    def end(name: str) -> None:
        ended.append(name)
        graces.begin(f"{name} again", 0.0)

    graces: Graces[str] = Graces(end, copy_context())
    graces.begin("a", 0.0)
    await eventually(lambda: "a again" in ended)
    for tick in tuple(graces._ticks):
        for name in tuple(graces._ticks[tick][2]):
            graces.cancel(name, tick)
    assert not graces._ticks


async def test_one_that_cannot_go_keeps_no_other() -> None:
    ended: list[str] = []
    raised: list[object] = []

    def end(name: str) -> None:
        if name == "broken":
            raise RuntimeError(name)
        ended.append(name)

    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: raised.append(context["exception"]))
    graces: Graces[str] = Graces(end, copy_context())
    for name in ("a", "broken", "b", "c"):
        graces.begin(name, 0.3)
    await eventually(lambda: sorted(ended) == ["a", "b", "c"])
    assert [str(each) for each in raised] == ["broken"]


class Marker:
    """Something of a request's context."""


async def test_an_ended_stream_keeps_nothing_of_its_request_but_what_it_tells() -> None:
    context: ContextVar[Marker] = ContextVar("context")

    async def generate(stream: KeptStream) -> None:
        stream.finish(decode_pb2.DecodeResponse())

    async def read(kept: KeptStreams) -> "weakref.ref[Marker]":
        marker = Marker()
        context.set(marker)
        stream = await kept.start(_kept("a", 1), generate, 60.0)
        with kept.reading(stream, 0):
            await eventually(lambda: stream.has_ended)
        return weakref.ref(marker)

    async with KeptStreams(KeepConfig(), _no_load) as kept:
        left = await asyncio.create_task(read(kept))
        await eventually(lambda: left() is None)
        assert len(kept) == 1


async def test_of_too_many_that_a_process_has_left_the_oldest_frees_its_blocks_and_its_slot() -> None:
    shape, ended = SlotShape(tokens=64, blocks=8), list[str]()
    descriptor = os.memfd_create("journal")
    os.ftruncate(descriptor, 2 * shape.num_bytes)
    journal = Journal(descriptor, shape, 2)
    journal.begin()

    async def own(stream: KeptStream) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(stream.kept.request_id)  # here its blocks are released

    async with KeptStreams(KeepConfig(max_parked=1), _no_load, journal) as kept:
        for name in ("first", "second"):
            slot = journal.open_slot(b"", [1, 2])
            assert slot is not None
            kept.take_over(LeftStream(_kept(name, 30), None, RecoveredDecode(slot, b"", [1, 2], None)), own)
        await eventually(lambda: journal.has_room)
        assert ended == ["first"]
        assert [stream.kept.request_id for stream in kept.streams] == ["second"]


def test_the_log_probabilities_of_a_prompt_count_until_they_are_read() -> None:
    request = _kept("a", 1)
    request.sampling.prompt_logprobs = 0
    stream = KeptStream(KeptRequest.of(request, 60.0), 2**20)
    before, logprobs = stream.size, stream.logprobs
    assert logprobs is not None
    stream.add(Tokens((7,), prompt_logprobs=PromptLogprobs((-0.5,) * 5000, 0)))
    assert stream.size >= before + 4 * 5000
    logprobs.prompt = None
    assert stream.size == before + 4
