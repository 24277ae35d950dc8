"""The work that failures may cause: a retry's cost to the budget, and its wait."""

import asyncio
import time
from typing import get_args

import grpc
import pytest
from grpc import aio
from support.clients.scraping import sample
from support.cluster.in_process import FAST_ROUTER, bench, simulated

from baton.errors import Draining, Overloaded, Unavailable
from baton.inference.v1 import generate_pb2
from router.config import RetryConfig
from router.routing.retry import Attempts, DoubtedFeature, Retries, Stage

BUDGET = 3
FULL = Overloaded("4 requests wait already", retry_after_seconds=0.4)
FULL_FOR_LONG = Overloaded("4 requests wait already", retry_after_seconds=400.0)
LOST = Unavailable("it went away")


def sent_again(stage: str) -> float:
    return sample("baton_router_retries_total", stage=stage) or 0.0


async def test_answers_that_have_not_begun_are_retried_within_the_budget_only() -> None:
    # One runs, one waits: all others are refused, on each of the workers.
    full = [
        simulated(f"d{index}", "decode", decode_step_seconds=0.05, max_batch=1, max_waiting=1) for index in range(3)
    ]
    retry = RetryConfig(budget_ratio=0, budget_floor=BUDGET, wait_seconds=0)
    async with bench(*full, router=FAST_ROUTER.model_copy(update={"retry": retry})) as running:
        before, started = sent_again("decode"), time.monotonic()
        request = generate_pb2.GenerateRequest(prompt="x", stopping={"max_tokens": 20})
        calls = [running.stub.GenerateUnary(generate_pb2.GenerateUnaryRequest(request=request)) for _ in range(60)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        refused = [one for one in answers if isinstance(one, aio.AioRpcError)]
        assert {one.code() for one in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert len(refused) > 40
        # One comes back with each second.
        assert sent_again("decode") - before <= BUDGET + (time.monotonic() - started) + 1


@pytest.mark.parametrize("stage", get_args(Stage))
def test_a_try_is_charged_unless_its_client_has_tokens(stage: Stage) -> None:
    retries = Retries(RetryConfig(budget_ratio=0, budget_floor=1, max_attempts=9))
    retries.attempts(stage).allow(LOST)
    with pytest.raises(Unavailable, match="went away"):
        retries.attempts(stage).allow(LOST)
    retries.attempts(stage).allow(LOST, has_tokens=True)
    retries.attempts(stage).allow(Draining("it drains"))


def test_a_request_is_tried_so_often_and_no_more() -> None:
    attempts = Retries(RetryConfig(max_attempts=3)).attempts("decode")
    attempts.allow(LOST)
    attempts.allow(LOST, has_tokens=True)
    attempts.allow(Draining("it drains"))
    with pytest.raises(Unavailable):
        attempts.allow(LOST, has_tokens=True)


def test_pauses_grow_and_differ() -> None:
    pauses = [[one.pause_seconds(LOST) for _ in range(4)] for one in (_attempts() for _ in range(50))]
    for number, least in enumerate((0.025, 0.05, 0.1, 0.2)):
        seconds = [each[number] for each in pauses]
        assert least <= min(seconds) < max(seconds) <= 2 * least
        assert len(set(seconds)) > 40


def test_a_pause_is_no_shorter_than_a_full_worker_asks_for_and_not_the_same_for_all() -> None:
    seconds = [_attempts().pause_seconds(FULL) for _ in range(50)]
    assert 0.4 <= min(seconds) < max(seconds) <= 0.5
    assert len(set(seconds)) > 40


async def test_there_is_no_pause_beyond_the_deadline() -> None:
    with pytest.raises(Overloaded):
        await asyncio.wait_for(_attempts().pause(FULL_FOR_LONG, remaining_seconds=390.0), 20)


async def test_what_drains_is_left_at_once() -> None:
    leaving = _attempts().pause(Draining("it drains"), remaining_seconds=0.0)
    with pytest.raises(StopIteration):  # it waits for nothing
        leaving.send(None)


def _attempts() -> Attempts:
    return Retries(RetryConfig()).attempts("decode")


def test_a_refusal_that_a_second_worker_repeats_is_believed() -> None:
    attempts = Retries(RetryConfig(max_attempts=9)).attempts("decode")
    attempts.allow(DoubtedFeature("no"))
    attempts.allow(DoubtedFeature("another thing"))
    attempts.allow(LOST)
    attempts.allow(DoubtedFeature("no"))
    with pytest.raises(DoubtedFeature, match="no"):
        attempts.allow(DoubtedFeature("no"))
