"""Workers whose replies are broken, beside a healthy one: clients get their answers, no token is lost or repeated."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import aio
from structlog.testing import capture_logs
from support.clients.scraping import since
from support.cluster.in_process import DECODE, FAST_ROUTER, PREFILL, Bench, Stream, bench, simulated
from support.eventually import eventually
from support.images.simulated_workers import about, multimodal
from support.servers.tampering import SILENCE, Ends, Reply, Tampered, tampered

from baton.calls import unary
from baton.engine.v1 import decode_pb2, embed_pb2, encode_pb2, handoff_pb2, prefill_pb2
from baton.error_details import from_rpc_error
from baton.inference.v1 import cluster_service_pb2, sampling_pb2
from baton.inference.v1 import embed_pb2 as inference_pb2
from router.config import EmbeddingsConfig, RetryConfig
from runtime.aio import timeout
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


def set_handoff(**fields: Any) -> Callable[[Any], Iterable[Reply]]:
    def change(reply: prefill_pb2.PrefillResponse) -> None:
        for name in fields:
            reply.handoff.ClearField(name)
        reply.handoff.MergeFrom(handoff_pb2.KvHandoff(**fields))

    return prefilled(change)


# What only the decode worker that is to read it can find out.
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
    # Blocks of a changed reply are not released: a short lease.
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


@pytest.mark.parametrize("name", HANDOFFS)
async def test_a_handoff_that_cannot_be_read_is_computed_again(name: str, undisturbed: Stream) -> None:
    async with bench(DECODE, router=IMPATIENT) as running, beside(running, "prefill", multiplexed=True) as broken:
        broken.changes["Prefill"] = HANDOFFS[name]
        stream = await asked_until_called(running, broken, "Prefill", undisturbed)
        assert stream.finished.decode_worker_id == "d1"
        assert stream.finished.usage.cached_tokens <= stream.finished.usage.prompt_tokens == 5


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


def only_yields(reply: decode_pb2.DecodeResponse) -> Iterable[Reply]:
    """No tokens, and in the place of the end that it yields."""
    return [decode_pb2.DecodeResponse(yielded=decode_pb2.DecodeYielded())] if reply.HasField("finished") else []


async def test_a_decode_that_yields_again_and_again_is_given_up() -> None:
    async with bench(router=IMPATIENT) as running, beside(running, "decode", multiplexed=True) as broken:
        broken.changes["Decode"] = only_yields
        with pytest.raises(aio.AioRpcError) as failed:
            await running.generate(**LONG)
        assert failed.value.code() is grpc.StatusCode.INTERNAL
        assert broken.calls["Decode"] < 10


# More than was asked for: the answer is complete, and the client gets nothing of the rest.


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
        bench(*workers, router=IMPATIENT) as running,
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
        bench(PREFILL, router=IMPATIENT) as running,
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

    async with bench(PREFILL, DECODE, router=IMPATIENT) as running:
        expected = await running.generate(**asked)
        async with beside(running, "decode", multiplexed=multiplexed) as broken:
            broken.changes["Decode"] = changed
            while not broken.calls["Decode"]:
                stream = await running.generate(**asked)
                assert stream.token_ids == expected.token_ids
            assert stream.placed == ("p1", "d1")
            assert [one.token_id for m in stream.messages for one in m.token.logprobs] == stream.token_ids


# What follows for the worker.


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


# Encode and Embed.


def reshaped(*shape: int) -> Callable[[Any], Iterable[Reply]]:
    def changed(reply: encode_pb2.EncodeResponse) -> Iterable[Reply]:
        reply.embeddings[0].shape[:] = shape
        return [reply]

    return changed


def cut(reply: encode_pb2.EncodeResponse) -> Iterable[Reply]:
    reply.embeddings[0].inline = reply.embeddings[0].inline[:-3]
    return [reply]


def sourceless(reply: encode_pb2.EncodeResponse) -> Iterable[Reply]:
    reply.embeddings[0].ClearField("inline")
    return [reply]


ENCODES: dict[str, Callable[[Any], Iterable[Reply]]] = {
    "undecodable": lambda _: [b"\xff\xff\xff"],
    "empty": lambda _: [b""],
    "unknown": lambda _: [Ends(2)],
    "silence": lambda _: [SILENCE],
    "too long": reshaped(2**31, 64),
    "no shape": reshaped(),
    "two": lambda reply: [encode_pb2.EncodeResponse(embeddings=[reply.embeddings[0]] * 2)],
    "cut": cut,
    "sourceless": sourceless,
}


@pytest.mark.parametrize("name", ENCODES)
async def test_a_broken_encode_is_run_again_elsewhere(name: str) -> None:
    workers = [multimodal("e1", "encode"), multimodal("p1", "prefill"), multimodal("d1", "decode")]
    uncached = IMPATIENT.model_copy(update={"embeddings": EmbeddingsConfig(max_bytes=0)})
    async with bench(*workers, router=uncached) as running:
        expected = await running.text_of(**about())
        async with tampered(running, multimodal("broken", "encode"), multiplexed=False) as broken:
            broken.changes["Encode"] = ENCODES[name]
            async with timeout(20):
                while not broken.calls["Encode"]:
                    assert await running.text_of(**about()) == expected


def vectors(change: Callable[[embed_pb2.EmbedResponse], None]) -> Callable[[Any], Iterable[Reply]]:
    def changed(reply: embed_pb2.EmbedResponse) -> Iterable[Reply]:
        change(reply)
        return [reply]

    return changed


EMBEDS: dict[str, Callable[[Any], Iterable[Reply]]] = {
    "undecodable": lambda _: [b"\xff\xff\xff"],
    "empty": lambda _: [b""],
    "unknown": lambda _: [Ends(2)],
    "silence": lambda _: [SILENCE],
    "one missing": vectors(lambda reply: reply.embeddings.pop()),
    "short": vectors(lambda reply: reply.embeddings[0].values.pop()),
    "not a number": vectors(lambda reply: reply.embeddings[0].values.__setitem__(3, float("nan"))),
}


@pytest.mark.parametrize("name", EMBEDS)
async def test_a_broken_embed_is_run_again_elsewhere(name: str) -> None:
    request = inference_pb2.EmbedRequest(inputs=[{"text": "one"}, {"text": "another"}])
    async with bench(simulated("e1", "embed"), router=IMPATIENT) as running:
        expected = await unary(running.stub.Embed(request, timeout=20))
        async with tampered(running, simulated("broken", "embed"), multiplexed=False) as broken:
            broken.changes["Embed"] = EMBEDS[name]
            async with timeout(20):
                while not broken.calls["Embed"]:
                    found = await unary(running.stub.Embed(request, timeout=20))
                    assert list(found.embeddings) == list(expected.embeddings)
