"""Workers that tell wrong things of a kept answer: the call ends with a status, and nobody pays less for it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import pytest
from support.clients.resuming import Received
from support.clients.scraping import since
from support.cluster.in_process import FAST_ROUTER, Bench, bench, simulated
from support.eventually import PATIENCE_SECONDS
from support.servers.tampering import Tampered, tampered

from baton.calls import stream, unary
from baton.engine.v1 import decode_pb2, resume_pb2
from baton.errors import InvalidRequest, StreamLost
from baton.inference.v1 import cluster_service_pb2, generate_pb2
from router.config import QuotaConfig, QuotasConfig
from router.resume.handle import Handle
from runtime.aio import timeout

_QUOTA = QuotaConfig(requests_per_second=1.0, tokens_per_second=0.1, burst_seconds=50_000.0)
_ROUTER = FAST_ROUTER.model_copy(update={"quotas": QuotasConfig(tenants={"acme": _QUOTA})})
_TENANT = (("x-baton-tenant", "acme"),)
_TOKENS = 60
_REQUEST = generate_pb2.GenerateRequest(
    prompt="read me", stopping={"max_tokens": _TOKENS, "ignore_eos": True}, response={"keep": {"seconds": 5}}
)


@dataclass
class Lying:
    """A router before a worker that decodes, whose first message to who attaches a test changes."""

    running: Bench
    worker: Tampered

    def tell(self, **fields: object) -> None:
        def change(attached: decode_pb2.DecodeAttached) -> None:
            for name, value in fields.items():
                setattr(attached, name, value)

        self.change(change)

    def change(self, change: Callable[[decode_pb2.DecodeAttached], None]) -> None:
        def changed(reply: decode_pb2.DecodeResponse) -> Iterator[decode_pb2.DecodeResponse]:
            if reply.HasField("attached"):
                change(reply.attached)
            yield reply

        self.worker.changes["Attach"] = changed

    async def begin(self) -> Received:
        """The beginning of an answer, which goes on without its client."""
        received = Received(_REQUEST)
        call = self.running.stub.Generate(_REQUEST, metadata=_TENANT, timeout=PATIENCE_SECONDS)
        async with aclosing(stream(call)) as messages:
            async for message in messages:
                received.add(message)
                if received.tokens >= 5:
                    break
        return received

    async def resume(self, message: generate_pb2.ResumeGenerationRequest, received: Received) -> None:
        call = self.running.stub.ResumeGeneration(message, metadata=_TENANT, timeout=PATIENCE_SECONDS)
        async for answer in stream(call):
            received.add(answer)

    async def tokens_left(self) -> float:
        [tenant] = (await self.running.operators.ListTenants(cluster_service_pb2.ListTenantsRequest())).tenants
        return float(tenant.tokens_left)


@asynccontextmanager
async def _lying() -> AsyncIterator[Lying]:
    own = simulated("lying", "prefill", "decode", decode_step_seconds=0.02)
    async with (
        bench(simulated("p1", "prefill"), router=_ROUTER, proxied=False) as running,
        tampered(running, own, multiplexed=False) as worker,
    ):
        yield Lying(running, worker)


_RECORDS = {
    "unreadable": b"\xff\xff",
    "of too many answers": resume_pb2.ResumeRecord(answers=2**32 - 1).SerializeToString(),
}


@pytest.mark.parametrize("record", _RECORDS.values(), ids=_RECORDS)
async def test_a_record_that_no_router_has_made_counts_as_a_lost_answer(record: bytes) -> None:
    async with _lying() as lying:
        received = await lying.begin()
        lying.tell(record=record)
        stub = lying.running.stub
        question = generate_pb2.GetGenerationProgressRequest(handle=received.handle)
        with pytest.raises(StreamLost):
            await unary(stub.GetGenerationProgress(question, metadata=_TENANT, timeout=PATIENCE_SECONDS))
        cancel = generate_pb2.CancelGenerationRequest(handle=received.handle)
        with pytest.raises(StreamLost):
            await unary(stub.CancelGeneration(cancel, metadata=_TENANT, timeout=PATIENCE_SECONDS))
        alone = generate_pb2.ResumeGenerationRequest(handle=received.handle, attempt=1, have=received.resume().have)
        with pytest.raises(StreamLost):
            await lying.resume(alone, received)


def _with_logprobs(attached: decode_pb2.DecodeAttached) -> None:
    attached.logprobs.add()


def _without_prompt(attached: decode_pb2.DecodeAttached) -> None:
    attached.ClearField("prompt")


def _without_tokens(attached: decode_pb2.DecodeAttached) -> None:
    attached.ClearField("token_ids")


def _with_an_unknown_token(attached: decode_pb2.DecodeAttached) -> None:
    attached.token_ids[0] = 2**32 - 1


def _without_readers(attached: decode_pb2.DecodeAttached) -> None:
    attached.attachment = 0


def _with_endless_readers(attached: decode_pb2.DecodeAttached) -> None:
    attached.attachment = 2**63


def _without_time(attached: decode_pb2.DecodeAttached) -> None:
    attached.remaining.FromSeconds(0)
    attached.is_over = False


def _before_its_time(attached: decode_pb2.DecodeAttached) -> None:
    attached.remaining.seconds = -(2**62)
    attached.is_over = False


@pytest.mark.parametrize(
    "change",
    [
        _without_time,
        _before_its_time,
        _with_logprobs,
        _without_prompt,
        _without_tokens,
        _with_an_unknown_token,
        _without_readers,
        _with_endless_readers,
    ],
)
async def test_what_no_worker_may_tell_of_an_answer_counts_as_lost_and_its_client_has_it_computed_again(
    change: Callable[[decode_pb2.DecodeAttached], None],
) -> None:
    faults = since("baton_router_worker_faults_total", stage="attach")
    async with _lying() as lying:
        received = await lying.begin()
        lying.change(change)
        await lying.resume(received.resume(), received)
    assert received.tokens == _TOKENS
    assert received.resumed[0].recomputed
    assert faults.grown >= 1


async def test_an_answer_that_is_complete_is_read_whatever_time_its_request_has_left() -> None:
    told: list[bool] = []

    def without_time(attached: decode_pb2.DecodeAttached) -> None:
        told.append(attached.is_over and attached.HasField("remaining"))
        attached.remaining.FromSeconds(0)  # as workers of a version before

    async with _lying() as lying:
        received = await lying.begin()
        question = generate_pb2.GetGenerationProgressRequest(handle=received.handle)
        async with timeout(PATIENCE_SECONDS):
            is_over = False
            while not is_over:
                progress = lying.running.stub.GetGenerationProgress(question, metadata=_TENANT)
                is_over = (await unary(progress)).answers[0].is_over
                await asyncio.sleep(0.02)
        lying.change(without_time)
        await lying.resume(received.resume(), received)
    assert received.tokens == _TOKENS
    assert not received.resumed[0].recomputed
    assert told == [False]


async def test_tokens_that_a_worker_has_not_given_are_paid_for_whatever_it_says_of_them() -> None:
    async with _lying() as lying:
        received = await lying.begin()
        before = await lying.tokens_left()
        lying.tell(read_tokens=2**32 - 1)
        await lying.resume(received.resume(), received)
        assert received.tokens == _TOKENS
        # What the worker had when it was asked may count as paid for; what it computed afterwards does not.
        assert before - await lying.tokens_left() > 10


async def test_a_request_of_more_answers_than_any_may_have_is_refused_before_they_are_counted() -> None:
    async with _lying() as lying:
        message = generate_pb2.ResumeGenerationRequest(handle=Handle.new("00" * 16).text, attempt=1)
        message.request.CopyFrom(_REQUEST)
        message.request.sampling.n = 1_000_000
        with pytest.raises(InvalidRequest, match=r"request\.sampling\.n: must be in \[1, 16\]") as refused:
            await lying.resume(message, Received(_REQUEST))
        assert refused.value.violations[0].field == "request.sampling.n"
