"""Workers whose replies are broken, beside a healthy one: clients get their answers, no token is lost or repeated."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from grpc import StatusCode, aio
from structlog.testing import capture_logs
from support.clients.scraping import since
from support.cluster.in_process import DECODE, PREFILL, Stream, bench, simulated
from support.eventually import eventually
from support.servers.broken_worker import IMPATIENT, LANES, LONG, asked_until_called, beside, router_for, tokens
from support.servers.tampering import SILENCE, Ends, Reply, tampered

from baton.engine.v1 import decode_pb2, handoff_pb2, prefill_pb2
from baton.error_details import from_rpc_error
from baton.inference.v1 import cluster_service_pb2

OUTSIDE = 2**31


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


def set_handoff(**fields: Any) -> Callable[[Any], Iterable[Reply]]:
    def change(reply: prefill_pb2.PrefillResponse) -> None:
        for name in fields:
            reply.handoff.ClearField(name)
        reply.handoff.MergeFrom(handoff_pb2.KvHandoff(**fields))

    return prefilled(change)


HANDOFFS: dict[str, Callable[[Any], Iterable[Reply]]] = {
    "blocks outside": set_handoff(block_ids=[2**32 - 1]),
    "too many blocks": set_handoff(block_ids=list(range(512))),
    "no blocks": set_handoff(block_ids=[]),
    "another id": set_handoff(handoff_id="another"),
    "no lease": set_handoff(lease={"seconds": 0}),
    "a past lease": set_handoff(lease={"seconds": -(2**62)}),
    "an endless lease": set_handoff(lease={"seconds": 2**62}, block_ids=[]),
    "nowhere": set_handoff(address="127.0.0.1:1"),
    "no address": set_handoff(address="\0"),
    "bytes": set_handoff(num_bytes=2**64 - 1),
    "a prefix": set_handoff(prefix_hash=b"another"),
    "an adapter": set_handoff(lora_digest="another"),
    "a state": set_handoff(engine_state=b"\xff" * 99),
    "cached": set_handoff(usage={"prompt_tokens": 2**32 - 1, "cached_tokens": 2**32 - 1}),
}


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


DECODES: dict[str, Callable[[], Callable[[Any], Iterable[Reply]]]] = {
    "undecodable": after(5, lambda _: [b"\xff\xff\xff"]),
    "an end without a reason": after(5, lambda _: [decode_pb2.DecodeResponse(finished=decode_pb2.DecodeFinished())]),
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
    "silence after tokens": after(5, lambda _: [SILENCE]),
    "invalid argument later": after(5, lambda _: [Ends(3)]),
}


@LANES
@pytest.mark.parametrize("name", PREFILLS)
async def test_a_broken_prefill_is_run_again_elsewhere(name: str, multiplexed: bool, undisturbed: Stream) -> None:
    async with (
        bench(PREFILL, DECODE, router=router_for(name)) as running,
        beside(running, "prefill", multiplexed=multiplexed) as broken,
    ):
        broken.changes["Prefill"] = PREFILLS[name]
        stream = await asked_until_called(running, broken, "Prefill", undisturbed)
        assert stream.placed == ("p1", "d1")
        assert stream.finished.migrations == 1


@pytest.mark.parametrize("name", HANDOFFS)
async def test_a_handoff_that_cannot_be_read_is_computed_again(name: str, undisturbed: Stream) -> None:
    async with (
        bench(DECODE, router=router_for(name)) as running,
        beside(running, "prefill", multiplexed=True) as broken,
    ):
        broken.changes["Prefill"] = HANDOFFS[name]
        stream = await asked_until_called(running, broken, "Prefill", undisturbed)
        assert stream.finished.decode_worker_id == "d1"
        assert stream.finished.usage.cached_tokens <= stream.finished.usage.prompt_tokens == 5


@LANES
@pytest.mark.parametrize("name", DECODES)
async def test_a_broken_decode_goes_on_elsewhere(name: str, multiplexed: bool, undisturbed: Stream) -> None:
    async with (
        bench(PREFILL, DECODE, router=router_for(name)) as running,
        beside(running, "decode", multiplexed=multiplexed) as broken,
    ):
        broken.changes["Decode"] = DECODES[name]()
        stream = await asked_until_called(running, broken, "Decode", undisturbed)
        assert stream.finished.decode_worker_id == "d1"
        assert stream.finished.migrations == 1
        await eventually(lambda: running.used_blocks() == 0)


async def test_a_worker_whose_replies_are_wrong_gets_no_requests_for_a_while_and_is_counted(
    undisturbed: Stream,
) -> None:
    faults = since("baton_router_worker_faults_total", stage="decode")
    with capture_logs() as lines:
        async with bench(PREFILL, DECODE) as running, beside(running, "decode", multiplexed=True) as broken:
            broken.changes["Decode"] = DECODES["a token outside at once"]()
            await asked_until_called(running, broken, "Decode", undisturbed)
            [state] = [one for one in await running.list_workers() if one.worker_id == "broken"]
            assert state.state == cluster_service_pb2.WORKER_STATE_UNHEALTHY
            assert "its replies are wrong: token 2147483648" in state.problem
            calls = broken.calls["Decode"]
            for _ in range(8):
                await running.generate(**LONG)
            assert broken.calls["Decode"] == calls
            await eventually(lambda: all(not worker.problem for worker in running.cluster.workers))
            assert faults.grown == 1
    assert [line["worker_id"] for line in lines if line["event"] == "worker suspended"] == ["broken"]


async def test_a_worker_alone_is_not_suspended_and_its_error_says_what_was_wrong() -> None:
    async with bench() as running, tampered(running, simulated("broken", "decode"), multiplexed=True) as broken:
        broken.changes["Decode"] = DECODES["a token outside at once"]()
        with pytest.raises(aio.AioRpcError) as caught:
            await running.generate(**LONG)
        error = from_rpc_error(caught.value)
        assert (error.reason, error.worker_id, error.stage) == ("INVALID_REPLY", "broken", "decode")
        broken.changes.clear()
        assert len((await running.generate(**LONG)).token_ids) == 60


async def test_a_slow_worker_in_whose_place_no_other_one_answers_is_unavailable() -> None:
    # One retry for all: one of the requests that wait for the silent worker gets it.
    retry = IMPATIENT.retry.model_copy(update={"budget_floor": 1, "budget_ratio": 0.0})
    router = IMPATIENT.model_copy(update={"retry": retry})
    async with bench(DECODE, router=router) as running, beside(running, "decode", multiplexed=True) as broken:
        broken.changes["Decode"] = DECODES["silence"]()
        requests = (running.generate(**LONG) for _ in range(6))
        ends = await asyncio.gather(*requests, return_exceptions=True)
        failed = [one for one in ends if isinstance(one, aio.AioRpcError)]
        assert failed
        for one in failed:
            error = from_rpc_error(one)
            assert one.code() is StatusCode.UNAVAILABLE
            assert (error.reason, error.worker_id, error.stage) == ("WORKER_TIMEOUT", "broken", "decode")
            assert error.message.startswith("no answer for ")
        assert all(isinstance(one, Stream) for one in ends if one not in failed)
