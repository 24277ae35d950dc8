"""Tenants that try to get more than their part: storms of cancellations, hopeless deadlines, wrong configurations."""

import asyncio
import gc
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from support.clock import ManualClock
from support.router.contexts import request_context
from support.router.measured_workers import StaticFleet, measured

from baton.errors import ConfigError, DeadlineUnreachable
from router.admission.controller import AdmissionController
from router.admission.fair_queue import FairQueue
from router.admission.lanes import Ticket
from router.admission.predictor import RequestEstimate
from router.admission.queue import AdmissionQueue
from router.admission.quotas import Quotas
from router.config import AdmissionConfig, QuotasConfig, RouterConfig
from router.qos import RequestQos
from router.telemetry import metrics
from runtime.config import load

WAITING, TENANTS = 10_000, 100


async def _enter(queue: AdmissionQueue, ticket: Ticket, inside: list[Ticket]) -> None:
    if not queue.enter_now(ticket):
        await queue.enter(ticket)
    inside.append(ticket)


def tickets() -> int:
    """Those that anything still refers to."""
    gc.collect()
    return sum(isinstance(one, Ticket) for one in gc.get_objects())


@pytest.mark.parametrize("fairness", ["weighted", "strict", "none"])
async def test_a_storm_of_cancellations_in_a_long_queue_leaves_exact_counts_and_no_request(fairness: str) -> None:
    chance, inside, before = random.Random(1), list[Ticket](), tickets()
    gauge = metrics.WAITING._value.get()
    order = FairQueue(fairness, ManualClock())  # type: ignore[arg-type]
    queue = AdmissionQueue(lambda: 4, 2 * WAITING, order=order)
    tasks = [
        asyncio.create_task(_enter(queue, order.ticket(f"t{number % TENANTS}", chance.randint(-10, 10), 100), inside))
        for number in range(WAITING + 4)
    ]
    await asyncio.sleep(0)
    assert (queue.running, queue.waiting) == (4, WAITING)
    # Some are admitted in the moment in which they are cancelled.
    for ticket in [*inside]:
        queue.leave(ticket, 1.0, 0, 10)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (queue.running, queue.waiting) == (0, 0)
    assert all((one.running, one.count, one.work) == (0, 0, 0.0) for one in order.tenants)
    assert metrics.WAITING._value.get() == gauge
    assert all(len(lane.heap) <= 64 + 4 * TENANTS for lane in order._lanes.values())
    inside.clear()
    del tasks, ticket, task
    await asyncio.sleep(0)
    assert tickets() == before
    assert queue.enter_now(order.ticket("later", 0, 1))


async def test_a_request_that_is_refused_for_its_deadline_counts_for_nothing() -> None:
    clock, fleet = ManualClock(), StaticFleet()
    fleet.set(measured(clock, "prefill", "decode", tokens_per_second=100.0, token_seconds=0.1))
    config = AdmissionConfig(max_running_per_worker=1)
    gate = AdmissionController(fleet, config, Quotas(QuotasConfig(), clock), clock, fairness="weighted")
    own = replace(request_context(), qos=RequestQos("own"))
    async with gate.admit(own, RequestEstimate("m", 100, 1)):
        (queue,) = gate.queues
        counters = {one.name: one.counter for one in queue.order.tenants}
        for number in range(1000):
            hopeless = replace(request_context(seconds=1.0), qos=RequestQos(f"t{number % 10}"))
            with pytest.raises(DeadlineUnreachable):
                async with gate.admit(hopeless, RequestEstimate("m", 10_000, 1)):
                    pass
        after = {one.name: one.counter for one in queue.order.tenants}
        assert {name: after[name] for name in counters} == counters
        assert {after[name] for name in after if name not in counters} == {queue.order._lanes[0].floor}
        assert all(not queue.order.recent_work(one) for one in queue.order.tenants if one.name != "own")
        assert (queue.running, queue.waiting) == (1, 0)


@pytest.mark.parametrize("value", [-1, -1e-9, math.nan, math.inf, 1e300, "much"])
@pytest.mark.parametrize("key", ["requests_per_second", "tokens_per_second", "burst_seconds"])
@pytest.mark.parametrize("where", ["default", "tenants.shop"])
def test_quotas_that_are_no_rates_are_refused_by_the_path_of_their_key(
    where: str, key: str, value: object, tmp_path: Path
) -> None:
    _assert_refused(f"quotas.{where}.{key}", value, tmp_path)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("quotas.default.burst_seconds", 0),
        ("quotas.default.concurrent", -1),
        ("quotas.default.concurrent", 1.5),
        ("quotas.default.unknown", 1),
        ("quotas.unreachable_seconds", -1),
        ("admission.unauthenticated_tenants", 0),
        ("admission.unauthenticated_tenants", 10**9),
    ],
)
def test_other_limits_that_make_no_sense_are_refused_by_their_path(path: str, value: object, tmp_path: Path) -> None:
    _assert_refused(path, value, tmp_path)


@pytest.mark.parametrize("name", ["t\u00e4nt", "x" * 129, "two\nlines", "\u202eshop"])
def test_a_quota_of_a_name_that_no_request_can_have_is_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(json.dumps({"quotas": {"tenants": {name: {"concurrent": 1}}}}))
    with pytest.raises(ConfigError, match=r"quotas\.tenants\."):
        load(RouterConfig, file)


def _assert_refused(path: str, value: object, folder: Path) -> None:
    file = folder / "router.yaml"
    file.write_text("")
    text = {math.inf: ".inf"}.get(value, ".nan" if value != value else value)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match=path.replace(".", r"\.")):
        load(RouterConfig, file, [f"{path}={text}"])
