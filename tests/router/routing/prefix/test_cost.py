"""The predicted cost of work, and its learning."""

import random

import pytest
from support.clock import ManualClock

from discovery.record import WorkerRecord
from router.routing.prefix.cost import Costs, LinearCost, RelativeCost
from router.routing.prefix.prefix_caches import Cache
from router.routing.prefix.work import Computed, PromptQueue, WorkShares


def record(worker_id: str) -> WorkerRecord:
    return WorkerRecord(worker_id, 1, "x:1", ("prefill",), "m", "simulated", "a" * 64, 1000)


def way(costs: Costs, owner: str, reader: str) -> RelativeCost:
    return costs.of(record(owner)).link_to(costs.of(record(reader)))


def test_a_line_is_learnt_from_noisy_measurements_whatever_was_assumed_before() -> None:
    source = random.Random(1)
    for base, rate in ((0.001, 1e-5), (0.05, 1e-3), (0.0, 2e-4)):
        cost = LinearCost(0.01, 5e-5, 4096.0)
        for _ in range(300):
            tokens = source.randrange(1, 8000)
            cost.add(tokens, (base + rate * tokens) * source.uniform(0.9, 1.1))
        for tokens in (500, 2000, 8000):
            assert cost.seconds(tokens) == pytest.approx(base + rate * tokens, rel=0.15)


def test_what_long_contexts_add_is_learnt() -> None:
    source, cost = random.Random(1), LinearCost(0.01, 5e-5, 4096.0)
    rate, bend = 2.5e-5, 2.5e-5 / 30_500
    for _ in range(300):
        cached, tokens = source.randrange(0, 120_000), source.randrange(100, 20_000)
        context = cached + tokens / 2
        cost.add(tokens, 0.01 + tokens * (rate + context * bend), context)
    for tokens, context in ((1000, 500.0), (1000, 100_000.0), (100_000, 50_000.0)):
        assert cost.seconds(tokens, context) == pytest.approx(0.01 + tokens * (rate + context * bend), rel=0.1)


def test_short_prompts_say_nothing_of_long_contexts() -> None:
    source, cost = random.Random(1), LinearCost(0.01, 5e-5, 4096.0)
    for _ in range(300):
        tokens = source.randrange(10, 1000)
        cost.add(tokens, (0.01 + 5e-5 * tokens) * source.uniform(0.8, 1.2), tokens / 2)
    assert cost.seconds(1000, 100_000.0) == pytest.approx(0.06, rel=0.3)


def test_measurements_of_one_size_leave_a_line_that_is_right_there_and_rises() -> None:
    cost = LinearCost(0.01, 5e-5, 4096.0)
    for _ in range(100):
        cost.add(1000, 0.5)
    assert cost.seconds(1000) == pytest.approx(0.5, rel=0.15)
    assert cost.base >= 0
    assert cost.rate >= 0


def test_a_prompt_waits_for_those_before_it_and_less_as_time_goes_by() -> None:
    clock = ManualClock()
    queue = PromptQueue(clock)
    first, second = queue.add(2.0), queue.add(3.0)
    clock.advance(1.0)
    assert queue.wait_seconds == 4.0
    clock.advance(4.0)
    # The first one is late; the second is still to be computed.
    assert queue.wait_seconds == 3.0
    assert queue.done(first, 20) == []
    clock.advance(1.5)
    assert queue.wait_seconds == 1.5
    assert queue.done(second, 30) == [Computed(1, 20, 5.0), Computed(1, 30, 1.5)]
    assert queue.done(second, 30) == []
    assert queue.wait_seconds == 0.0


def test_a_prompt_behind_one_that_was_given_up_is_not_measured() -> None:
    clock = ManualClock()
    queue = PromptQueue(clock)
    first, second, third = queue.add(1.0), queue.add(1.0), queue.add(1.0)
    clock.advance(30.0)
    queue.give_up(first)
    # It may have been computed beside the first one.
    clock.advance(0.01)
    assert queue.done(second, 10) == []
    clock.advance(1.0)
    assert queue.done(third, 10) == [Computed(1, 10, pytest.approx(1.0))]


def test_a_prompt_after_those_that_were_given_up_is_measured() -> None:
    clock = ManualClock()
    queue = PromptQueue(clock)
    queue.give_up(queue.add(1.0))
    clock.advance(30.0)
    next_one = queue.add(1.0)
    clock.advance(1.5)
    assert queue.done(next_one, 10) == [Computed(1, 10, pytest.approx(1.5))]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_prompts_of_one_step_share_the_time_that_it_took_in_whichever_order_they_are_ready(
    order: tuple[int, ...],
) -> None:
    clock = ManualClock()
    queue = PromptQueue(clock)
    tickets = [queue.add(1.0) for _ in range(5)]
    clock.advance(0.2)
    for number in order:
        assert queue.done(tickets[number], 100) == []
        clock.advance(0.0005)
    clock.advance(0.1)
    step, alone = queue.done(tickets[4], 50)
    assert (step.prompts, step.tokens) == (4, 400)
    assert step.seconds == pytest.approx(0.2, abs=0.002)
    assert alone == Computed(1, 50, pytest.approx(0.1, abs=0.002))


def test_a_small_prompt_that_overtakes_a_large_one_counts_with_it() -> None:
    clock = ManualClock()
    queue = PromptQueue(clock)
    large, small = queue.add(2.0), queue.add(0.1)
    clock.advance(0.5)
    assert queue.done(small, 10) == []
    clock.advance(1.5)
    assert queue.done(large, 1000) == [Computed(2, 1010, 2.0)]


def test_a_slow_worker_is_known_and_a_new_one_is_taken_for_the_usual() -> None:
    costs = Costs()
    for _ in range(200):
        for process, seconds in (("a", 0.1), ("b", 0.1), ("c", 0.1), ("slow", 0.3)):
            costs.of(record(process)).prefill.add(1000, seconds)
    usual, slow = (costs.of(record(process)).prefill.seconds(1000) for process in ("a", "slow"))
    assert slow > 2 * usual
    assert usual < costs.of(record("new")).prefill.seconds(1000) < slow


def test_a_worker_is_not_taken_for_quick_because_all_are_quicker_than_was_assumed() -> None:
    """Before, the first one that seemed to be got all requests, and the others were never measured again."""
    costs = Costs()
    for _ in range(40):
        for process in "abc":
            costs.of(record(process)).prefill.add(400, 0.002)
        assert {costs.of(record(process)).prefill.slowness for process in "abc"} == {1.0}


def test_what_is_known_of_the_way_between_two_workers_is_forgotten_with_either_of_them() -> None:
    costs = Costs()
    for _ in range(50):
        way(costs, "a", "c").add(1_000_000, 0.1)
        way(costs, "a", "b").add(1_000_000, 0.3)
    slow = way(costs, "a", "b").seconds(1_000_000)
    assert slow > 2 * way(costs, "a", "c").seconds(1_000_000)
    costs.forget(record("b").process)
    assert way(costs, "a", "b").seconds(1_000_000) < slow


def test_one_measurement_far_above_all_others_moves_the_prediction_little() -> None:
    costs = Costs()
    worker = costs.of(record("a"))
    for _ in range(50):
        worker.prefill.add(1000, 0.1)
    worker.prefill.add(1000, 60.0)
    assert worker.prefill.seconds(1000) < 0.15


def test_a_rank_that_was_given_more_has_the_larger_share_and_a_new_one_the_mean() -> None:
    shares = WorkShares()
    first, second = shares.rank(Cache("w")), shares.rank(Cache("w"))
    for _ in range(10):
        shares.give(first, second, 300, 3.0)
        shares.give(second, first, 100, 1.0)
    assert first.given_tokens > second.given_tokens
    assert first.given_tokens > shares.rank(Cache("w")).given_tokens > second.given_tokens


def test_shares_of_work_follow_a_change_and_never_overflow() -> None:
    shares = WorkShares()
    first, second = shares.rank(Cache("w")), shares.rank(Cache("w"))
    for _ in range(1000):
        shares.give(first, second, 100, 1.0)
    for _ in range(1_000_000):
        shares.give(second, first, 100, 1.0)
    assert first.given_tokens < second.given_tokens / 1e6
    for _ in range(3000):
        shares.give(first, second, 100, 1.0)
    assert first.given_tokens > second.given_tokens


def test_what_a_frozen_worker_took_is_not_believed_forever() -> None:
    clock = ManualClock()
    costs = Costs(clock=clock)
    handoff = way(costs, "a", "b")
    for _ in range(100):
        handoff.add(1_000_000, 0.004)
    usual = handoff.seconds(1_000_000)
    for _ in range(50):
        handoff.add(1_000_000, 30.0)
    frozen = handoff.seconds(1_000_000)
    assert frozen > 20 * usual
    # From now on its work is done elsewhere, and decisions go on.
    for _ in range(180):
        clock.advance(1.0)
        costs.fade()
    assert handoff.seconds(1_000_000) < 2 * usual


def test_what_is_measured_again_and_again_does_not_fade() -> None:
    clock = ManualClock()
    costs = Costs(clock=clock)
    prefill = costs.of(record("a")).prefill
    for _ in range(300):
        clock.advance(1.0)
        prefill.add(1000, 3.0)
        costs.fade()
    assert prefill.seconds(1000) == pytest.approx(3.0, rel=0.15)
