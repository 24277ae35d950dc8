"""Workers whose replies are broken, beside a healthy one: clients get their answers, no token is lost or repeated."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.cluster.in_process import DECODE, FAST_ROUTER, PREFILL, Bench, Stream, bench, simulated
from support.eventually import eventually
from support.servers.tampering import SILENCE, Ends, Reply, Tampered, tampered

from baton.engine.v1 import decode_pb2, prefill_pb2
from baton.inference.v1 import sampling_pb2
from router.config import RetryConfig
from services.config import HandoffConfig

SEEDED = {"temperature": 1.0, "seed": 3}
LONG = {"prompt": "hello", "sampling": SEEDED, "stopping": {"max_tokens": 60}}
IMPATIENT = FAST_ROUTER.model_copy(update={"retry": RetryConfig(answer_seconds=0.3, wait_seconds=0)})
OUTSIDE = 2**31


@pytest.fixture(scope="module")
def undisturbed() -> Stream:
    """What a cluster answers where nothing goes wrong, asked once."""

    async def ask() -> Stream:
        async with bench(PREFILL, DECODE) as running:
            return await running.generate(**LONG)

    return asyncio.run(ask())


# Replies of Prefill.


def prefilled(change: Callable[[prefill_pb2.PrefillResponse], None]) -> Callable[[Any], Iterable[Reply]]:
    """A reply of Prefill that was changed in place."""

    def changed(reply: prefill_pb2.PrefillResponse) -> Iterator[Reply]:
        change(reply)
        yield reply

    return changed


def other_layout(reply: prefill_pb2.PrefillResponse) -> None:
    reply.handoff.layout_digest = "another"


def other_epoch(reply: prefill_pb2.PrefillResponse) -> None:
    reply.handoff.epoch += 1


def other_owner(reply: prefill_pb2.PrefillResponse) -> None:
    reply.handoff.worker_id = "another"


def other_length(reply: prefill_pb2.PrefillResponse) -> None:
    reply.handoff.num_tokens += 7


def token_outside(reply: prefill_pb2.PrefillResponse) -> None:
    reply.handoff.first_token.token_id = OUTSIDE


def no_token(reply: prefill_pb2.PrefillResponse) -> None:
    reply.handoff.ClearField("first_token")


def nothing_held(reply: prefill_pb2.PrefillResponse) -> None:
    reply.handoff.ClearField("handoff_id")


PREFILLS: dict[str, Callable[[Any], Iterable[Reply]]] = {
    "undecodable": lambda _: [b"\xff\xff\xff"],
    "empty": lambda _: [b""],
    "internal": lambda _: [Ends(13)],
    "unknown": lambda _: [Ends(2)],
    "data loss": lambda _: [Ends(15)],
    "unauthenticated": lambda _: [Ends(16)],
    "permission denied": lambda _: [Ends(7)],
    "not found": lambda _: [Ends(5)],
    "deadline": lambda _: [Ends(4)],
    "silence": lambda _: [SILENCE],
    **{
        change.__name__: prefilled(change)
        for change in (other_layout, other_epoch, other_owner, other_length, token_outside, no_token, nothing_held)
    },
}

# Replies of Decode: for each of the healthy ones, those that come instead.


def tokens(*ids: int) -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(tokens=decode_pb2.DecodedTokens(token_ids=ids))


def after(count: int, broken: Callable[[Any], Iterable[Reply]]) -> Callable[[], Callable[[Any], Iterable[Reply]]]:
    """Broken once so many tokens have come on this worker."""

    def make() -> Callable[[Any], Iterable[Reply]]:
        left = count

        def changed(reply: decode_pb2.DecodeResponse) -> Iterable[Reply]:
            nonlocal left
            if reply.WhichOneof("event") != "tokens":
                return [reply] if left > 0 or reply.HasField("accepted") else broken(reply)
            left -= len(reply.tokens.token_ids)
            return [reply] if left >= 0 else broken(reply)

        return changed

    return make


def at_once(broken: Callable[[Any], Iterable[Reply]]) -> Callable[[], Callable[[Any], Iterable[Reply]]]:
    return lambda: broken


NO_TOKENS = decode_pb2.DecodeResponse(
    finished=decode_pb2.DecodeFinished(reason=sampling_pb2.FINISH_REASON_END_OF_SEQUENCE)
)

DECODES: dict[str, Callable[[], Callable[[Any], Iterable[Reply]]]] = {
    "undecodable": after(5, lambda _: [b"\xff\xff\xff"]),
    "undecodable at once": at_once(lambda _: [b"\xff\xff\xff"]),
    "internal": after(5, lambda _: [Ends(13)]),
    "unknown": after(5, lambda _: [Ends(2)]),
    "already exists": at_once(lambda _: [Ends(6)]),
    "deadline": after(5, lambda _: [Ends(4)]),
    "unavailable": after(5, lambda _: [Ends(14)]),
    "a token outside": after(5, lambda _: [tokens(OUTSIDE)]),
    "tokens outside": after(5, lambda _: [tokens(OUTSIDE, 5, 6)]),
    "a token outside at once": at_once(lambda _: [tokens(OUTSIDE)]),
    "silence": at_once(lambda _: [SILENCE]),
}
LANES = pytest.mark.parametrize("multiplexed", [False, True], ids=["calls", "multiplexed"])


@asynccontextmanager
async def beside(running: Bench, role: str, *, multiplexed: bool) -> AsyncIterator[Tampered]:
    """A broken worker beside the bench's."""
    # What a changed reply held, nobody releases: a short lease.
    config = simulated("broken", role).model_copy(update={"handoff": HandoffConfig(lease_seconds=0.5)})
    async with tampered(running, config, multiplexed=multiplexed) as broken:
        yield broken


async def asked_until_called(running: Bench, broken: Tampered, method: str, expected: Stream) -> Stream:
    """The first answer for which the broken worker was called. All are as they should be."""
    for _ in range(50):
        before = broken.calls[method]
        stream = await running.generate(**LONG)
        assert stream.token_ids == expected.token_ids
        assert stream.text == expected.text
        assert [message.sequence for message in stream.messages] == list(range(len(stream.messages)))
        if broken.calls[method] > before:
            return stream
    raise AssertionError("the broken worker was never called")


@LANES
@pytest.mark.parametrize("name", PREFILLS)
async def test_a_broken_prefill_is_run_again_elsewhere(name: str, multiplexed: bool, undisturbed: Stream) -> None:
    async with (
        bench(PREFILL, DECODE, router=IMPATIENT) as running,
        beside(running, "prefill", multiplexed=multiplexed) as broken,
    ):
        broken.changes["Prefill"] = PREFILLS[name]
        stream = await asked_until_called(running, broken, "Prefill", undisturbed)
        assert stream.placed == ("p1", "d1")
        assert stream.finished.migrations == 1


@LANES
@pytest.mark.parametrize("name", DECODES)
async def test_a_broken_decode_goes_on_elsewhere(name: str, multiplexed: bool, undisturbed: Stream) -> None:
    async with (
        bench(PREFILL, DECODE, router=IMPATIENT) as running,
        beside(running, "decode", multiplexed=multiplexed) as broken,
    ):
        broken.changes["Decode"] = DECODES[name]()
        stream = await asked_until_called(running, broken, "Decode", undisturbed)
        assert stream.finished.decode_worker_id == "d1"
        assert stream.finished.migrations == 1
        await eventually(lambda: running.used_blocks() == 0)
