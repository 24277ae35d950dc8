"""Admission control: queue, quotas and predictions together, with workers that the test sets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from support.clock import ManualClock
from support.router.contexts import request_context
from support.router.measured_workers import Measured, StaticFleet, measured

from baton.errors import DeadlineUnreachable, NoWorker, Overloaded
from router.admission.controller import AdmissionController
from router.admission.predictor import RequestEstimate
from router.admission.quotas import Quotas
from router.config import AdmissionConfig, QuotaConfig, QuotasConfig


class Admission:
    """Admission control before workers that a test sets; of each model one request runs on each."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.fleet = StaticFleet()
        self._entered: list[Request] = []  # a task that nothing refers to is collected, and leaves
        self.fleet.set(self.worker())
        self.start()

    def start(self, quota: QuotaConfig | None = None, **config: float) -> None:
        quotas = Quotas(QuotasConfig(default=quota or QuotaConfig()), self.clock)
        admission = AdmissionConfig(**{"max_running_per_worker": 1, **config})  # type: ignore[arg-type]
        self.gate = AdmissionController(self.fleet, admission, quotas, self.clock)

    def worker(self, model: str = "m", **facts: object) -> Measured:
        return measured(self.clock, "prefill", "decode", model=model, **facts)  # type: ignore[arg-type]

    async def enter(self, prompt: int = 1, seconds: float = 3600, model: str = "m") -> "Request":
        """A request that has gone as far as it can for now."""
        request = Request(self.gate, RequestEstimate(model, prompt, 1), seconds)
        self._entered.append(request)
        await settle()
        return request


class Request:
    """One that stays inside until it is told to leave."""

    def __init__(self, controller: AdmissionController, estimate: RequestEstimate, seconds: float) -> None:
        self.is_inside = False
        self._leave = asyncio.Event()
        self.task = asyncio.create_task(self._run(controller, estimate, seconds))

    async def _run(self, controller: AdmissionController, estimate: RequestEstimate, seconds: float) -> None:
        async with controller.admit(request_context(seconds=seconds), estimate):
            self.is_inside = True
            await self._leave.wait()

    async def leave(self) -> None:
        self._leave.set()
        await self.task
        await settle()


async def settle() -> None:
    """Lets every task that can run, run."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def admission() -> Admission:
    return Admission()


@pytest.fixture
async def following(admission: Admission) -> AsyncIterator[Admission]:
    """One that hears of its workers' changes."""
    task = asyncio.create_task(admission.gate.follow())
    await settle()
    yield admission
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_a_worker_that_comes_takes_what_waits_at_once(following: Admission) -> None:
    inside, waits = await following.enter(), await following.enter()
    assert (inside.is_inside, waits.is_inside) == (True, False)
    following.fleet.set(following.worker(), following.worker())
    await settle()
    assert waits.is_inside


async def test_a_worker_that_is_well_again_takes_what_waits_at_once(following: Admission) -> None:
    following.fleet.set(following.worker(problem="its health check failed"))
    waits = await following.enter()
    assert not waits.is_inside
    following.fleet.set(following.worker())
    await settle()
    assert waits.is_inside


async def test_while_no_worker_is_ready_requests_wait_instead_of_being_refused(following: Admission) -> None:
    inside = await following.enter()
    waiting = [await following.enter() for _ in range(3)]
    following.fleet.set()
    await inside.leave()
    assert not any(each.task.done() or each.is_inside for each in waiting)
    following.fleet.set(following.worker())
    await settle()
    assert [each.is_inside for each in waiting] == [True, False, False]


async def test_an_outage_that_lasts_is_unavailable(admission: Admission) -> None:
    admission.start(outage_seconds=0)
    admission.fleet.set()
    refused = await admission.enter()
    with pytest.raises(NoWorker, match="no decode worker"):
        await asyncio.wait_for(refused.task, 10)


@pytest.mark.parametrize("facts", [{"problem": "it hangs"}, {"draining": True}], ids=["not ready", "draining"])
async def test_a_worker_that_takes_no_requests_is_no_room(admission: Admission, facts: dict[str, object]) -> None:
    admission.fleet.set(admission.worker(), admission.worker(**facts))
    inside = await admission.enter()
    assert not (await admission.enter()).is_inside
    assert inside.is_inside


async def test_each_model_has_a_line_of_its_own(admission: Admission) -> None:
    admission.fleet.set(admission.worker(), admission.worker("n"))
    kept = [await admission.enter(), await admission.enter()]
    assert [each.is_inside for each in kept] == [True, False]
    assert (await admission.enter(model="n")).is_inside
    assert (admission.gate.waiting("m"), admission.gate.waiting("n")) == (1, 0)


async def test_a_prompt_that_a_full_line_refuses_costs_its_tenant_no_tokens(admission: Admission) -> None:
    admission.start(QuotaConfig(tokens_per_second=1, burst_seconds=100), max_waiting=0)
    inside = await admission.enter()
    for _ in range(3):
        refused = await admission.enter(prompt=90)
        assert isinstance(refused.task.exception(), Overloaded)
    await inside.leave()
    assert (await admission.enter(prompt=90)).is_inside


async def test_a_prompt_whose_client_leaves_the_line_costs_no_tokens(admission: Admission) -> None:
    admission.start(QuotaConfig(tokens_per_second=1, burst_seconds=100))
    inside, gone = await admission.enter(), await admission.enter(prompt=90)
    gone.task.cancel()
    await settle()
    await inside.leave()
    assert (await admission.enter(prompt=90)).is_inside


async def test_what_became_hopeless_while_it_waited_is_refused_and_frees_its_place(admission: Admission) -> None:
    inside = await admission.enter()
    hopeless, after = await admission.enter(prompt=1000, seconds=5), await admission.enter()
    # Now it is known that a prompt of 1,000 tokens takes ten seconds.
    admission.fleet.set(admission.worker(tokens_per_second=100, token_seconds=0.01))
    await inside.leave()
    assert isinstance(hopeless.task.exception(), DeadlineUnreachable)
    assert after.is_inside


async def test_the_wait_in_the_line_counts_against_the_deadline(admission: Admission) -> None:
    for _ in range(4):
        request = await admission.enter()
        admission.clock.advance(30)
        await request.leave()
    inside = await admission.enter()
    refused = await admission.enter(seconds=20)
    assert isinstance(refused.task.exception(), DeadlineUnreachable)
    assert not (await admission.enter(seconds=40)).task.done()
    assert inside.is_inside
