"""Steps of decodes and short chunks of prompts, padded to a captured size: the same as the step itself."""

import asyncio
import gc
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from support.engines.checkpoints import PlainModel, save_qwen3
from support.engines.device import DEVICE
from support.engines.embedded import Checkpoint
from support.engines.engine_calls import blocks_used, collect, greedy

from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.pytorch.runners.batch import Chunk
from services.engines.pytorch.runners.fused_runner import FusedRunner
from services.engines.pytorch.runners.mixed_steps import MixedSize, fill_mixed, mixed_sizes, smallest_step
from services.engines.pytorch.runners.step_tensors import KNOWN, PADDING
from services.engines.pytorch.steps import pipeline

Ids = Callable[[int, int], tuple[int, ...]]

BLOCK_TOKENS = 16
LONG = 32_000


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = save_qwen3(tmp_path_factory.mktemp("long"), positions=LONG + 1000)
    return Checkpoint(path, PlainModel(path), execution="fused")


@pytest.mark.parametrize(
    ("most_sequences", "most_tokens", "expected"),
    [
        (4, 64, [(4, 32), (4, 64)]),
        (8, 20, [(8, 20)]),
        (20, 100, [(8, 32), (8, 50), (8, 100), (16, 32), (16, 50), (16, 100), (20, 32), (20, 50), (20, 100)]),
        (500, 32, [(8, 32), (16, 32), (32, 32), (64, 32), (128, 32), (256, 32)]),
        (64, 0, []),
    ],
)
def test_sizes_double_up_to_what_is_asked_for(
    most_sequences: int, most_tokens: int, expected: list[tuple[int, int]]
) -> None:
    assert mixed_sizes(most_sequences, most_tokens) == [MixedSize(*size) for size in expected]


@pytest.mark.parametrize("counts", [(2, 2, 2, 2), (65, 65, 65, 61), (256,), (193, 2, 2, 59), (64, 64, 64, 64)])
def test_every_step_of_a_size_has_its_tiles(counts: tuple[int, ...]) -> None:
    size = next(size for size in mixed_sizes(8, 256) if size.holds(0, len(counts), sum(counts)))
    tiles = sum(-(-count // 16) for count in counts)
    assert tiles <= size.layout(1).shape[3] <= tiles + 3


def _chunk(core: EngineCore, seed: int, start: int, count: int, blocks: Sequence[int]) -> Chunk:
    tokens = tuple(random.Random(seed).choices(range(8, 250), k=start + count))
    sequence = core.new_sequence(Prompt(tokens), greedy(4), lambda _event: None, hold=False)
    sequence.blocks, sequence.computed = list(blocks), start
    return Chunk.next_of(sequence, count)


def _chunks(core: EngineCore, singles: Sequence[int], prompts: Sequence[tuple[int, int]]) -> list[Chunk]:
    """Chunks of (first position, tokens), in scattered blocks."""
    spans = [(start, 1) for start in singles] + list(prompts)
    needs = [-(-(start + count) // BLOCK_TOKENS) for start, count in spans]
    free = random.Random(9).sample(range(1, core.memory.num_blocks), sum(needs))
    found = []
    for seed, ((start, count), need) in enumerate(zip(spans, needs, strict=True)):
        found.append(_chunk(core, seed, start, count, [free.pop() for _ in range(need)]))
    return found


def _captured(core: EngineCore) -> FusedRunner:
    runner = core.runner
    assert isinstance(runner, FusedRunner)
    while runner.prepare_more():
        pass
    return runner


BESIDE = [([], LONG), ([5, 0, 31, 32, 700], 4000), (list(range(3, 19)), 0)]
"""Positions of single tokens, and the context of the prompt beside them."""


@pytest.mark.parametrize("prompts", [(2, 2), (15, 0), (16, 3), (17, 1), (100, 2), (250, 1)], ids=str)
async def test_a_padded_step_computes_what_the_step_itself_does(long: Checkpoint, prompts: tuple[int, int]) -> None:
    """A prompt of so many new tokens, and a number of further ones."""
    count, others = prompts
    further = [(64, 2), (1000, 3), (0, 2)][:others]

    def compare(core: EngineCore) -> None:
        runner = _captured(core)
        pool = core.memory.tensor
        for singles, context in BESIDE:
            torch.manual_seed(context)
            pool.normal_()
            chunks = _chunks(core, singles, [(context, count), *further])
            step = smallest_step(runner._mixed, chunks)
            assert step is not None
            before = pool.clone()
            expected = [each.clone() for each in runner._compute(chunks)]
            filled = pool.clone()
            pool.copy_(before)
            logits, outcome = runner._compute_mixed(step, chunks)
            torch.testing.assert_close(logits, expected[0], rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(pool[1:], filled[1:], rtol=1e-4, atol=1e-4)
            assert torch.equal(outcome[1], expected[1][1])
            assert torch.equal(outcome[0], logits.argmax(dim=-1))
            assert torch.equal(runner._newest[: len(chunks)], outcome[0])

    async with long.engine(max_sequences=16, kv_cache_bytes=40 << 20) as engine:
        await engine._loop.call(compare)


async def test_a_padded_step_says_where_each_token_stands(llama_fused: Checkpoint) -> None:
    def fill(core: EngineCore) -> None:
        single, prompt = _chunk(core, 1, 32, 1, [7, 3, 9]), _chunk(core, 2, 16, 3, [4, 5])
        single.sequence.in_flight.tokens = single.sequence.in_flight.ids = 1
        single = Chunk.next_of(single.sequence, 1)
        size = MixedSize(2, 32)
        layout = size.layout(4)
        parts = layout.parts(fill_mixed(size, layout, [single, prompt], {single.sequence: 6}))
        assert parts.sources.tolist() == [6] + [KNOWN] * 33
        assert parts.positions.tolist() == [33, PADDING, 16, 17, 18] + [PADDING] * 29
        assert tuple(parts.ids[2:5].tolist()) == prompt.sequence.prompt.token_ids[16:]
        assert parts.rows[:5].tolist() == [0, 0, 2, 2, 2]
        assert parts.tables.tolist() == [[7, 3, 9, 0], [0] * 4, [4, 5, 0, 0], [0] * 4, [0] * 4, [0] * 4]
        assert parts.tiles.tolist() == [[2, 3, 16, 2, 0]] + [[0, 0, PADDING, 0, 0]] * 4
        assert parts.last_rows[:2].tolist() == [0, 4]

    async with llama_fused.engine() as engine:
        await engine._loop.call(fill)


async def test_steps_that_do_not_fit_or_report_more_are_computed_as_they_are(llama_fused: Checkpoint) -> None:
    def choose(core: EngineCore) -> None:
        steps = _captured(core)._mixed
        assert (found := smallest_step(steps, _chunks(core, [1] * 9, [(0, 20), (9, 13)]))) is not None
        assert found.size == MixedSize(16, 64)
        assert smallest_step(steps, _chunks(core, [], [(0, 65)])) is None
        assert smallest_step(steps, _chunks(core, [], [(0, 2)] * 5)) is None
        assert smallest_step(steps, _chunks(core, [1] * 17, [(0, 2)])) is None
        [unfinished] = _chunks(core, [], [(0, 30)])
        assert smallest_step(steps, [Chunk.next_of(unfinished.sequence, 20)]) is None
        reporting = Sampling(max_tokens=4, prompt_logprobs=1)
        reported = core.new_sequence(Prompt((5, 6, 7)), reporting, lambda _event: None, hold=False)
        assert smallest_step(steps, [Chunk.next_of(reported, 3)]) is None

    async with llama_fused.engine(max_sequences=16, graph_prompt_tokens=64) as engine:
        await engine._loop.call(choose)
    async with llama_fused.engine(graph_prompt_tokens=0) as engine:
        assert await engine._loop.call(lambda core: smallest_step(_captured(core)._mixed, [])) is None


async def test_follow_up_turns_beside_streams_get_the_plain_models_ids(
    llama_fused: Checkpoint, random_ids: Ids
) -> None:
    """Some greedy, some drawn: the ids that a padded step samples are those that the next step reads."""
    prefix = random_ids(320, 1)
    turns = [prefix + random_ids(length, length) for length in (2, 15, 16, 17, 60, 100)]
    drawn = Sampling(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)

    async def answers(engine: PyTorchEngine) -> list[tuple[int, ...]]:
        await collect(engine.decode(Prompt(prefix), greedy(1)))
        streams = [
            asyncio.create_task(collect(engine.decode(Prompt(random_ids(9, 50 + n)), greedy(60)))) for n in (0, 1)
        ]
        found = []
        for turn in turns:
            found += [await collect(engine.decode(Prompt(turn), sampling)) for sampling in (greedy(12), drawn)]
        found += await asyncio.gather(*(collect(engine.decode(Prompt(turn), greedy(12))) for turn in turns))
        found += await asyncio.gather(*streams)
        return [one.ids for one in found]

    async with llama_fused.engine(graph_prompt_tokens=0) as engine:
        expected = await answers(engine)
    async with llama_fused.engine() as engine:
        counts = await engine._loop.call(_counted)
        assert await answers(engine) == expected
        assert blocks_used(engine) == 0
    assert len(counts) >= 10
    assert expected[0] == llama_fused.generate(turns[0], 12)


def _counted(core: EngineCore) -> list[int]:
    """Returns a list that gets the tokens of each padded step."""
    runner, counts = _captured(core), list[int]()
    compute = runner._compute_mixed

    def counted(step: object, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, torch.Tensor]:
        counts.append(sum(chunk.count for chunk in chunks))
        return compute(step, chunks)  # type: ignore[arg-type]

    runner._compute_mixed = counted  # type: ignore[assignment, method-assign]
    return counts


async def test_a_worker_that_is_never_idle_prepares_between_two_steps(
    llama_fused: Checkpoint, random_ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_BUSY_SECONDS", 0.0)
    monkeypatch.setattr(pipeline, "_PREPARING_SHARE", 1e6)
    prepared: list[tuple[bool, int]] = []
    ids = [random_ids(9, 60 + n) for n in (0, 1)]

    def watch(core: EngineCore) -> None:
        capture = core.runner.prepare_more

        def more() -> bool:
            prepared.append((core.steps._inflight is None, len(core.scheduler.running)))
            if isinstance(core.runner, FusedRunner):
                core.runner._newest.fill_(3)  # as the padding of a capture does
            return capture() or len(prepared) < 5

        core.runner.prepare_more = more  # type: ignore[method-assign]
        core.steps._is_prepared, core.steps._prepare_at = False, 0.0  # on a CPU nothing is left after the warm-up

    async with llama_fused.engine() as engine:
        await engine._loop.call(watch)
        answers = await asyncio.gather(*(collect(engine.decode(Prompt(each), greedy(60))) for each in ids))
    assert len(prepared) >= 5
    assert all(is_between and running for is_between, running in prepared)
    assert [one.ids for one in answers] == [llama_fused.generate(each, 60) for each in ids]


async def test_a_preparation_that_took_long_is_the_last_one_beside_requests(
    llama_fused: Checkpoint, random_ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_BUSY_SECONDS", 0.0)
    monkeypatch.setattr(pipeline, "_LONGEST_PREPARING_SECONDS", 0.0)
    calls: list[int] = []

    def watch(core: EngineCore) -> None:
        def more() -> bool:
            calls.append(len(core.scheduler.running))
            return True

        core.runner.prepare_more = more  # type: ignore[method-assign]
        core.steps._is_prepared, core.steps._prepare_at = False, 0.0  # on a CPU nothing is left after the warm-up

    async with llama_fused.engine() as engine:
        await engine._loop.call(watch)
        await collect(engine.decode(Prompt(random_ids(9, 60)), greedy(60)))
    assert len([running for running in calls if running]) == 1


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: make gpu")
async def test_sizes_are_captured_beside_a_stream_that_never_ends(
    llama_fused: Checkpoint, random_ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_BUSY_SECONDS", 0.0)
    monkeypatch.setattr(pipeline, "_IDLE_SECONDS", 60.0)
    monkeypatch.setattr(pipeline, "_PREPARING_SHARE", 1e6)
    asked = random_ids(9, 60)
    async with llama_fused.engine(max_sequences=16) as engine:
        runner = engine.runner
        assert isinstance(runner, FusedRunner)
        await engine._loop.call(lambda core: _leave_captures(core, runner))
        before = len(runner._uncaptured)
        answer = await collect(engine.decode(Prompt(asked), greedy(600)))
        assert len(runner._uncaptured) < before
    assert answer.ids[:300] == llama_fused.generate(asked, 300)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: make gpu")
async def test_all_sizes_are_captured_before_the_first_step_and_those_left_while_nothing_runs(
    llama_fused: Checkpoint,
) -> None:
    async with llama_fused.engine(max_sequences=16) as engine:
        runner = engine.runner
        assert isinstance(runner, FusedRunner)
        assert not runner._uncaptured
        await engine._loop.call(lambda core: _leave_captures(core, runner))
        async with asyncio.timeout(30):
            while runner._uncaptured:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert sorted(step.size for step in runner._mixed) == mixed_sizes(16, 256)


def _leave_captures(core: EngineCore, runner: FusedRunner) -> None:
    """Leaves captures to later, as a process that takes kept memory over does."""
    runner._uncaptured[:0] = sorted(step.size for step in runner._mixed)
    runner._mixed.clear()
    core.steps._is_prepared, core.steps._prepare_at = False, 0.0


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: make gpu")
async def test_a_graph_that_is_garbage_does_not_end_a_capture(llama_fused: Checkpoint) -> None:
    async with llama_fused.engine(max_sequences=16) as engine:
        runner = engine.runner
        assert isinstance(runner, FusedRunner)
        assert await engine._loop.call(lambda _core: _captured_beside_garbage(runner)) == 1.0


def _captured_beside_garbage(runner: FusedRunner) -> float:
    """Captures a sum while a graph becomes garbage, and returns what its replay adds."""
    numbers = torch.zeros(1, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):  # type: ignore[no-untyped-call]
        numbers.add_(0)
    graphs = [graph]
    del graph

    def compute() -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            garbage: list[object] = [graphs.pop()]
            garbage.append(garbage)
            del garbage
            gc.set_threshold(1, 1, 1)
            _ = [[number] for number in range(1000)]
        return numbers.add_(1)

    before = gc.get_threshold()
    try:
        _, replay = runner._captured(compute)
    finally:
        gc.set_threshold(*before)
    numbers.zero_()
    replay()
    return numbers.item()
