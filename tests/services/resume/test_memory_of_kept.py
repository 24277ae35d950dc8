"""The memory of kept answers, and the time at which it is freed."""

import asyncio
import gc
import sys
import tracemalloc
from contextvars import copy_context
from functools import partial
from hashlib import sha256

from support.eventually import eventually

from baton.engine.v1 import decode_pb2
from services.config import KeepConfig
from services.engines.answer import Tokens
from services.engines.base import EngineLoad
from services.resume.graces import Graces
from services.resume.stream import KeptStream
from services.resume.streams import KeptStreams

_ANSWERS = 300
# That of a plain request by gRPC.
_RECORD_BYTES = 145


def _no_load() -> EngineLoad:
    raise AssertionError("nothing is parked")


async def _generate(tokens: int, stream: KeptStream) -> None:
    stream.accept(decode_pb2.DecodeResponse(accepted=decode_pb2.DecodeAccepted()))
    stream.add(Tokens(range(tokens)))
    stream.finish(decode_pb2.DecodeResponse(finished=decode_pb2.DecodeFinished()))


async def _answer(kept: KeptStreams, number: int, tokens: int = 2) -> None:
    request = decode_pb2.DecodeRequest(request_id=f"{number:036d}")
    request.prompt.token_ids.extend(range(300, 556))
    request.keep.secret_sha256 = sha256(b"%d" % number).digest()
    request.keep.owner_sha256 = sha256(b"owner %d" % number).digest()
    request.keep.record = number.to_bytes(_RECORD_BYTES, "big")
    request.keep.grace.FromSeconds(60)
    stream = await kept.start(request, partial(_generate, tokens), 60.0)
    with kept.reading(stream, 0):
        await eventually(lambda: stream.has_ended)


async def _taken(kept: KeptStreams, tokens: int) -> float:
    """The bytes that Python takes for each further answer that has ended, beside its prompt."""
    await _answer(kept, 0, tokens)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(1, _ANSWERS + 1):
            await _answer(kept, number, tokens)
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
