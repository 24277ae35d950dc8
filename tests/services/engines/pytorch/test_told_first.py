"""Clients are told of a step's tokens before the engine's thread does what only later steps need."""

import asyncio
from collections.abc import Callable
from functools import partial

import pytest
from support.engines.embedded import Checkpoint
from support.engines.engine_calls import greedy

from services.engines.answer import Tokens
from services.engines.prompt import Prompt
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.pytorch.sequence import Event, Failed, Token
from services.engines.pytorch.steps import outcomes
from services.engines.pytorch.steps.pipeline import StepPipeline

Ids = Callable[[int, int], tuple[int, ...]]


async def _read(engine: PyTorchEngine, prompt: tuple[int, ...], tokens: int, read: list[int]) -> None:
    async for item in engine.decode(Prompt(prompt), greedy(tokens)):
        if isinstance(item, Tokens):
            read += item.ids


async def test_the_event_loop_runs_before_the_next_step_while_the_device_has_more_to_do(
    llama: Checkpoint, random_ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepPipeline, "spare_seconds", 20.0)
    read: dict[tuple[int, ...], list[int]] = {random_ids(20, seed): [] for seed in range(3)}
    missing: list[int] = []
    async with llama.engine() as engine:
        scheduler = engine._core.scheduler

        def scheduling(schedule: Callable[[], object]) -> object:
            missing.extend(one.generated - len(read[tuple(one.prompt.token_ids)]) for one in scheduler.running)
            return schedule()

        for name in ("schedule", "schedule_ahead"):
            monkeypatch.setattr(scheduler, name, partial(scheduling, getattr(scheduler, name)))
        await asyncio.gather(*(_read(engine, prompt, 30, ids) for prompt, ids in read.items()))
    assert [len(ids) for ids in read.values()] == [30, 30, 30]
    assert len(missing) > 60
    assert set(missing) == {0}


async def test_an_event_loop_that_is_late_holds_up_no_step(
    llama: Checkpoint, random_ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepPipeline, "spare_seconds", 0.001)
    ids: list[int] = []
    async with llama.engine() as engine:
        engine._loop._deliver = lambda told: [outcome() for outcome in told]  # type: ignore[method-assign, assignment]
        await asyncio.wait_for(_read(engine, random_ids(20, 1), 30, ids), 60)
    assert len(ids) == 30


async def test_tokens_are_told_before_the_blocks_of_a_long_sequence_are_freed(
    llama: Checkpoint, random_ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "_MANY_BLOCKS", 4)
    long, short = random_ids(100, 1), random_ids(20, 2)

    def run(core: EngineCore) -> None:
        events: dict[str, list[Event]] = {"long": [], "short": []}
        told: list[tuple[int, int, int]] = []
        core.steps.before_freeing = lambda: told.append((core._pool.used, len(events["long"]), len(events["short"])))
        core.submit(core.new_sequence(Prompt(short), greedy(20), events["short"].append, hold=False))
        core.submit(core.new_sequence(Prompt(long), greedy(3), events["long"].append, hold=False))
        while core.steps.step():
            pass
        [(used, of_long, of_short)] = told
        assert used >= 9
        assert of_long == 3  # all tokens, and not the end
        assert of_short == 3
        assert len(events["long"]) == 4
        assert core._pool.used == 0
        for name, prompt, tokens in (("long", long, 3), ("short", short, 20)):
            assert not any(isinstance(event, Failed) for event in events[name])
            ids = [event.token_id for event in events[name] if isinstance(event, Token)]
            assert tuple(ids) == llama.generate(prompt, tokens)

    async with llama.engine() as engine:
        await engine._loop.call(run)
