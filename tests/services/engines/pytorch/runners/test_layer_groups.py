"""The end of a long prompt beside decodes, in groups of layers: the same as at once."""

import asyncio
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from support.engines.checkpoints import PlainModel, save_qwen3
from support.engines.embedded import Checkpoint
from support.engines.engine_calls import blocks_used, collect, greedy

from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.pytorch.runners import layer_groups
from services.engines.pytorch.runners.batch import Chunk
from services.engines.pytorch.runners.fused_runner import FusedRunner
from services.engines.pytorch.runners.layer_groups import LayerGroups
from services.engines.pytorch.runners.mixed_steps import smallest_step
from services.engines.pytorch.sequence import Event, State, TokenSequence

Ids = Callable[[int, int], tuple[int, ...]]

BLOCK_TOKENS = 16
CONTEXT = 160
DRAWN = Sampling(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)


@pytest.fixture(autouse=True)
def short_prompts_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_groups, "LONG_CONTEXT", CONTEXT)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = save_qwen3(tmp_path_factory.mktemp("deep"), positions=1024)
    return Checkpoint(path, PlainModel(path), execution="fused")


def _runner(core: EngineCore) -> FusedRunner:
    runner = core.runner
    assert isinstance(runner, FusedRunner)
    while runner.prepare_more():
        pass
    return runner


def _chunk(core: EngineCore, seed: int, start: int, count: int, free: list[int]) -> Chunk:
    tokens = tuple(random.Random(seed).choices(range(8, 250), k=start + count))
    sequence = core.new_sequence(Prompt(tokens), greedy(4), lambda _event: None, hold=False)
    sequence.blocks = [free.pop() for _ in range(-(-(start + count) // BLOCK_TOKENS))]
    sequence.computed = start
    return Chunk.next_of(sequence, count)


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 32, 80])
def test_every_layer_is_in_one_group(layers: int) -> None:
    ranges = LayerGroups(layers).ranges
    assert [layer for group in ranges for layer in group] == list(range(layers))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    assert len(ranges) == min(8, layers)


@pytest.mark.parametrize("count", [2, 17, 32])
async def test_groups_compute_what_the_step_itself_does(deep: Checkpoint, count: int) -> None:
    def compare(core: EngineCore) -> None:
        runner, pool = _runner(core), core.memory.tensor
        torch.manual_seed(count)
        pool.normal_()
        free = random.Random(9).sample(range(1, core.memory.num_blocks), 100)
        singles = [_chunk(core, seed, start, 1, free) for seed, start in enumerate((5, 0, 31, 70))]
        prompt = _chunk(core, 50, 2 * CONTEXT, count, free)
        step = smallest_step(runner._mixed, [*singles, prompt])
        assert step is not None
        before = pool.clone()
        logits, _ = runner._compute([*singles, prompt])
        expected, filled = logits.clone(), pool.clone()
        pool.copy_(before)
        continues = layer_groups.continued([*singles, prompt])
        assert len(step.groups) == len(runner._groups.ranges) > 1
        for index, run in enumerate(step.groups):
            is_last = runner._groups.is_last(index)
            mixed = layer_groups.replace(step, run=run)
            found, outcome = runner._compute_mixed(mixed, [*singles, prompt] if is_last else continues)
            assert len(found) == 4 + is_last
            torch.testing.assert_close(found, expected[: len(found)], rtol=1e-3, atol=1e-3)
            assert torch.equal(outcome[0], found.argmax(dim=-1))
        torch.testing.assert_close(pool[1:], filled[1:], rtol=1e-4, atol=1e-4)

    async with deep.engine(max_sequences=16) as engine:
        await engine._loop.call(compare)


class Run:
    """A core with streams, whose steps are watched."""

    def __init__(self, core: EngineCore, streams: Sequence[tuple[int, ...]], tokens: int = 60) -> None:
        self.core = core
        self.ids: dict[str, list[int]] = {}
        self.groups: list[int | None] = []
        runner = _runner(core)
        choose = runner._groups.next_of

        def watched(*arguments: object) -> int | None:
            self.groups.append(choose(*arguments))  # type: ignore[arg-type]
            return self.groups[-1]

        runner._groups.next_of = watched  # type: ignore[method-assign]
        self.streams = [self.submit(f"stream {n}", each, greedy(tokens)) for n, each in enumerate(streams)]
        for _ in range(3):
            core.steps.step()
        self.groups.clear()

    def submit(self, name: str, prompt: tuple[int, ...], sampling: Sampling) -> TokenSequence:
        ids = self.ids[name] = []

        def sink(event: Event) -> None:
            if token := getattr(event, "token_id", None):
                ids.append(token)

        sequence = self.core.new_sequence(Prompt(prompt), sampling, sink, hold=False)
        self.core.submit(sequence)
        return sequence

    def finish(self) -> dict[str, tuple[int, ...]]:
        while self.core.steps.step():
            pass
        assert self.core._pool.used == 0
        return {name: tuple(ids) for name, ids in self.ids.items()}


def _cached(core: EngineCore, prompt: tuple[int, ...]) -> None:
    core.submit(core.new_sequence(Prompt(prompt), greedy(1), lambda _event: None, hold=False))
    while core.steps.step():
        pass


async def test_a_prompt_has_its_first_token_after_all_groups_and_streams_one_with_each(
    deep: Checkpoint, random_ids: Ids
) -> None:
    prompt, streams = random_ids(CONTEXT + 20, 1), [random_ids(9, 50), random_ids(30, 51)]

    def run(core: EngineCore) -> None:
        _cached(core, prompt[: CONTEXT + 1])
        beside = Run(core, streams)
        sequence = beside.submit("prompt", prompt, greedy(12))
        last = len(_runner(core)._groups.ranges) - 1
        before = len(beside.ids["stream 0"])
        while not beside.ids["prompt"]:
            core.steps.step()
            assert sequence.computed == (CONTEXT if not beside.ids["prompt"] else CONTEXT + 20)
        assert beside.groups == list(range(last + 1))
        assert len(beside.ids["stream 0"]) >= before + last
        answers = beside.finish()
        assert answers["prompt"] == deep.generate(prompt, 12)
        assert [answers[f"stream {n}"] for n in (0, 1)] == [deep.generate(each, 60) for each in streams]

    async with deep.engine(max_sequences=8) as engine:
        await engine._loop.call(run)


async def test_a_prompt_that_comes_between_has_the_other_computed_at_once(deep: Checkpoint, random_ids: Ids) -> None:
    prompt, other = random_ids(CONTEXT + 20, 1), random_ids(12, 2)

    def run(core: EngineCore) -> None:
        _cached(core, prompt[: CONTEXT + 1])
        beside = Run(core, [random_ids(9, 50)])
        beside.submit("prompt", prompt, greedy(12))
        core.steps.step()
        beside.submit("other", other, greedy(12))
        answers = beside.finish()
        assert beside.groups[:2] == [0, None]
        assert answers["prompt"] == deep.generate(prompt, 12)
        assert answers["other"] == deep.generate(other, 12)

    async with deep.engine(max_sequences=8) as engine:
        await engine._loop.call(run)


@pytest.mark.parametrize("steps", [1, 2, 3])
async def test_nothing_is_left_of_one_that_is_aborted_between_its_groups(
    deep: Checkpoint, random_ids: Ids, steps: int
) -> None:
    prompt, stream = random_ids(CONTEXT + 20, 1), random_ids(9, 50)

    def run(core: EngineCore) -> None:
        _cached(core, prompt[: CONTEXT + 1])
        beside = Run(core, [stream])
        aborted = beside.submit("aborted", prompt, greedy(12))
        for _ in range(steps):
            core.steps.step()
        core.abort(aborted)
        beside.submit("again", prompt, greedy(12))
        answers = beside.finish()
        assert answers["again"] == deep.generate(prompt, 12)
        assert answers["stream 0"] == deep.generate(stream, 60)

    async with deep.engine(max_sequences=8) as engine:
        await engine._loop.call(run)


async def test_one_that_loses_its_blocks_between_its_groups_begins_again(deep: Checkpoint, random_ids: Ids) -> None:
    prompt = random_ids(CONTEXT + 20, 1)

    def run(core: EngineCore) -> None:
        _cached(core, prompt[: CONTEXT + 1])
        beside = Run(core, [random_ids(9, 50)])
        sequence = beside.submit("prompt", prompt, greedy(12))
        while sequence.state is not State.RUNNING:
            core.steps.step()
        core.steps.step()
        core.steps.finish_step()
        core.scheduler._preempt(sequence)
        answers = beside.finish()
        assert beside.groups.count(0) == 2
        assert answers["prompt"] == deep.generate(prompt, 12)

    async with deep.engine(max_sequences=8) as engine:
        await engine._loop.call(run)


async def test_a_preparation_between_two_groups_has_the_prompt_begin_again(deep: Checkpoint, random_ids: Ids) -> None:
    prompt = random_ids(CONTEXT + 20, 1)

    def run(core: EngineCore) -> None:
        _cached(core, prompt[: CONTEXT + 1])
        beside = Run(core, [random_ids(9, 50)])
        beside.submit("prompt", prompt, greedy(12))
        core.steps.step()
        core.steps.finish_step()
        runner = _runner(core)
        runner._kept_rows.residual.fill_(7.0)  # as the padding of a capture does
        runner.prepare_more()
        answers = beside.finish()
        assert beside.groups[:2] == [0, 0]
        assert answers["prompt"] == deep.generate(prompt, 12)

    async with deep.engine(max_sequences=8) as engine:
        await engine._loop.call(run)


async def test_answers_are_those_without_groups(
    deep: Checkpoint, random_ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some greedy, some drawn, beside streams that begin and end meanwhile."""
    prefix = random_ids(320, 1)
    turns = [prefix + random_ids(length, length) for length in (2, 15, 16, 17, 30, 32)]

    async def answers(engine: PyTorchEngine) -> list[tuple[int, ...]]:
        await collect(engine.decode(Prompt(prefix), greedy(1)))
        streams = [
            asyncio.create_task(collect(engine.decode(Prompt(random_ids(9, 50 + n)), greedy(40 + 10 * n))))
            for n in range(6)
        ]
        found = []
        for turn in turns:
            found += [await collect(engine.decode(Prompt(turn), sampling)) for sampling in (greedy(12), DRAWN)]
        found += await asyncio.gather(*(collect(engine.decode(Prompt(turn), DRAWN)) for turn in turns))
        found += await asyncio.gather(*streams)
        return [one.ids for one in found]

    async with deep.engine(max_sequences=16) as engine:
        found = await answers(engine)
        assert blocks_used(engine) == 0
    monkeypatch.setattr(layer_groups, "LONG_CONTEXT", 1 << 30)
    async with deep.engine(max_sequences=16) as engine:
        assert await answers(engine) == found
    assert found[0] == deep.generate(turns[0], 12)
