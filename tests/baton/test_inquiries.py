"""The questions by which a client finds out that its router is lost, and not its worker slow; and when they are due."""

from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TypeVar

import pytest
from support.cluster.in_process import FAST_ROUTER, bench, simulated
from support.eventually import eventually
from support.servers.tcp_proxy import TcpProxy

from baton import Resume
from baton.calls import stream, unary
from baton.errors import BatonError
from baton.generation.inquiries import Finding, Inquiries, Question, Reply
from baton.generation.resuming import Received, Silence
from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc
from router.server import host_router
from rpc.channels import open_channel
from runtime.aio import timeout

Value = TypeVar("Value")
# No router is left for its silence alone.
_RESUME = Resume(keep_seconds=30.0, stall_seconds=30.0)
_ALLOWING = FAST_ROUTER.model_copy(update={"allow_faults": True})
_REQUEST = generate_pb2.GenerateRequest(
    prompt="go on", stopping={"max_tokens": 400, "ignore_eos": True}, sampling={"seed": 4, "temperature": 0.7}
)


@dataclass
class Asking:
    """A client of two routers, of which the first is behind a proxy, and what it has asked."""

    stubs: Sequence[inference_service_pb2_grpc.InferenceServiceStub]
    proxy: TcpProxy
    rule: Inquiries
    asked: list[tuple[int, str]]

    async def read(self, plan: str, tokens: int) -> Received:
        """The beginning of an answer, which goes on without this client."""
        received = Received(_REQUEST, _RESUME)
        _, message = received.next_call()
        metadata = [("x-baton-fault", plan)] if plan else []
        count = 0
        async for event in stream(self.stubs[0].Generate(message, metadata=metadata)):
            received.add(event)
            count += len(event.token.token_ids)
            if count >= tokens:
                break
        return received

    async def find(self, inquiry: Generator[Question, Reply, Value]) -> Value:
        question = next(inquiry)
        while True:
            self.asked.append((question.router, question.method.partition("/")[2]))
            try:
                question = inquiry.send(await self._ask(question))
            except StopIteration as found:
                value: Value = found.value
                return value

    async def _ask(self, question: Question) -> Reply:
        method = getattr(self.stubs[question.router], question.method.partition("/")[2])
        try:
            reply: Reply = await unary(method(question.message, timeout=question.seconds))
        except BatonError as error:
            return error
        return reply


@pytest.fixture
async def asking() -> AsyncIterator[Asking]:
    worker = simulated("worker", "prefill", "decode", decode_step_seconds=0.005, allow_faults=True)
    async with timeout(40), bench(worker, router=_ALLOWING, proxied=False) as running, AsyncExitStack() as stack:
        other = await stack.enter_async_context(host_router(FAST_ROUTER, running.registry))
        await eventually(lambda: sum(not worker.problem for worker in other.cluster.workers) == 1)
        proxy = await stack.enter_async_context(TcpProxy(running.address))
        channels = [await stack.enter_async_context(open_channel(one)) for one in (proxy.address, other.address)]
        stubs = [inference_service_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
        found = Asking(stubs, proxy, Inquiries(_RESUME, 2), [])
        # The other router is connected.
        assert await found.find(found.rule.meet(1))
        found.asked.clear()
        yield found


async def test_a_router_that_answers_is_not_left_and_no_other_is_asked(asking: Asking) -> None:
    received = await asking.read("", 5)
    assert await asking.find(asking.rule.ask(0, received)) is Finding.ANSWERS
    assert asking.asked == [(0, "GetServerInfo")]


async def test_a_router_that_hangs_is_left_if_another_one_sees_more_of_the_answer(asking: Asking) -> None:
    received = await asking.read("", 5)
    asking.proxy.freeze()
    assert not asking.rule.is_known_lost(0, received)
    assert await asking.find(asking.rule.ask(0, received)) is Finding.LOST
    assert asking.rule.is_known_lost(0, received)
    assert asking.asked == [(0, "GetServerInfo"), (1, "GetGenerationProgress")]


async def test_a_router_that_hangs_is_not_left_while_its_worker_has_no_more_of_the_answer(asking: Asking) -> None:
    received = await asking.read("delay=20@decode:5", 5)
    asking.proxy.freeze()
    assert await asking.find(asking.rule.ask(0, received)) is Finding.SILENT
    assert asking.asked == [(0, "GetServerInfo"), (1, "GetGenerationProgress")]


async def test_a_router_is_not_left_at_once_if_there_is_no_other(asking: Asking) -> None:
    received = await asking.read("", 5)
    asking.proxy.freeze()
    assert await asking.find(Inquiries(_RESUME, 1).ask(0, received)) is Finding.SILENT
    assert asking.asked == [(0, "GetServerInfo")]


async def test_a_router_that_one_stream_leaves_for_its_silence_is_lost_for_all(asking: Asking) -> None:
    rule = Inquiries(Resume(keep_seconds=30.0, stall_seconds=0.4), 1)
    received, another = await asking.read("", 5), await asking.read("", 5)
    asking.proxy.freeze()
    received.silence.heard_at -= 1.0
    assert await asking.find(rule.ask(0, received)) is Finding.LOST
    # Threads that wait for their turn to ask would else take it one after another.
    assert rule.is_known_lost(0, another)


def test_a_question_is_due_after_a_few_usual_gaps_and_later_after_each_that_finds_nothing() -> None:
    silence = Silence(_RESUME)
    assert silence.seconds_until_due > 10
    silence.hear(is_token=False)
    silence.hear(is_token=True)
    assert silence.seconds_until_due < 0.2
    silence.heard_at -= 1.0  # a gap of a second
    silence.hear(is_token=True)
    assert 1.5 < silence.seconds_until_due < 3
    silence.heard_at -= 5.0
    assert silence.seconds_until_due < 0
    silence.postpone()
    assert 4 < silence.seconds_until_due < 6


def test_a_stream_that_has_moved_gives_the_next_router_its_time() -> None:
    silence = Silence(_RESUME)
    silence.hear(is_token=True)
    silence.move()
    assert silence.seconds_until_due > 10
    silence.hear(is_token=True)
    assert silence.seconds_until_due < 0.2


def test_a_stream_that_has_left_a_silent_router_is_more_patient_for_a_while() -> None:
    silence = Silence(_RESUME)
    silence.hear(is_token=True)
    once = silence.seconds_until_due
    silence.leave()
    silence.move()
    silence.hear(is_token=True)
    assert once < silence.seconds_until_due < 1
    for _ in range(100):
        silence.hear(is_token=True)
    assert silence.seconds_until_due < 0.2


def test_a_program_that_wakes_up_late_does_not_ask() -> None:
    silence = Silence(_RESUME)
    assert silence.was_held_up(0.2)
    assert not silence.was_held_up(0.01)
    silence.heard_at -= 20.0
    assert not silence.was_held_up(0.2)
