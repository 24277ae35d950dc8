"""The fused model's steps: padded batch sizes, block tables, steps started ahead, and sampling on the device."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from support.engines.device import DEVICE
from support.engines.embedded import Checkpoint
from support.engines.engine_calls import Generated, blocks_used, collect, greedy
from support.eventually import eventually
from tokenizers import Tokenizer

from baton.errors import ConfigError
from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.pytorch.runners import step_tensors
from services.engines.pytorch.runners.batch import Chunk
from services.engines.pytorch.runners.runner import LibraryRunner
from services.engines.pytorch.runners.step_tensors import Layout, buckets, build, fill_decodes
from services.engines.pytorch.sampling import drawing

Ids = Callable[[int, int], tuple[int, ...]]

DRAWS = {
    "temperature": Sampling(max_tokens=40, temperature=1.0, seed=1, ignore_eos=True),
    "top-k": Sampling(max_tokens=40, temperature=0.8, top_k=5, seed=2, ignore_eos=True),
    "top-p": Sampling(max_tokens=40, temperature=1.3, top_p=0.9, seed=3, ignore_eos=True),
    "min-p": Sampling(max_tokens=40, temperature=1.0, min_p=0.1, seed=4, ignore_eos=True),
    "all three": Sampling(max_tokens=40, temperature=1.1, top_k=40, top_p=0.8, min_p=0.02, seed=5, ignore_eos=True),
    "greedy": greedy(40),
    "minimum": Sampling(max_tokens=40, temperature=0.0, min_tokens=30),
    "penalties": Sampling(max_tokens=40, temperature=0.7, seed=6, repetition_penalty=1.3, ignore_eos=True),
    "biased": Sampling(max_tokens=40, temperature=1.0, seed=7, logit_bias={40: 3.0}, ignore_eos=True),
    "log probabilities": Sampling(max_tokens=40, temperature=1.0, seed=8, logprobs=3, ignore_eos=True),
}


async def _answers(engine: PyTorchEngine, *names: str) -> list[Generated]:
    """Generates for all prompts at once."""
    prompts = [Prompt(tuple(range(9, 9 + 3 * len(name)))) for name in names]
    return list(
        await asyncio.gather(
            *(collect(engine.decode(prompt, DRAWS[name])) for prompt, name in zip(prompts, names, strict=True))
        )
    )


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 64, 100, 256, 300, 1000])
def test_batch_sizes_grow_to_the_most_and_pad_by_less_than_double(most: int) -> None:
    sizes = buckets(most)
    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))
    for batch in range(1, most + 1):
        assert next(size for size in sizes if size >= batch) <= max(2 * batch - 1, batch + 31)


def _chunk(checkpoint: Checkpoint, engine: PyTorchEngine, tokens: int, start: int, blocks: list[int]) -> Chunk:
    prompt = Prompt(tuple(range(10, 10 + tokens)))
    sequence = engine._core.new_sequence(prompt, greedy(4), lambda _event: None, hold=False)
    sequence.blocks = blocks
    sequence.computed = start
    return Chunk.next_of(sequence, tokens - start)


async def test_a_decode_step_says_where_each_token_stands_and_pads_the_rest(llama: Checkpoint) -> None:
    async with llama.engine(execution="fused") as engine:
        first = _chunk(llama, engine, 33, 32, [7, 3, 9])
        second = _chunk(llama, engine, 5, 4, [4])
    # The second one's id is not known yet: the step before samples it at place 6.
    second.sequence.in_flight.tokens = second.sequence.in_flight.ids = 1
    second = Chunk.next_of(second.sequence, 1)
    layout = Layout(4, 4, 5)
    flat = layout.empty()
    fill_decodes(flat, layout, [first, second], {second.sequence: 6})
    ids, sources, positions, rows = flat[:16].reshape(4, 4).tolist()
    assert (ids[0], sources[0], positions[0]) == (42, step_tensors.KNOWN, 32)
    assert (sources[1], positions[1]) == (6, 5)
    assert positions[2:] == [step_tensors.PADDING] * 2
    assert rows == [0, 1, 2, 3]
    assert flat[16:].reshape(4, 5).tolist() == [[7, 3, 9, 0, 0], [4, 0, 0, 0, 0], [0] * 5, [0] * 5]


async def test_prompts_of_a_step_are_cut_into_tiles_the_longest_work_first(llama: Checkpoint) -> None:
    async with llama.engine(execution="fused") as engine:
        alone = _chunk(llama, engine, 17, 16, [5, 6])
        fresh = _chunk(llama, engine, 200, 0, list(range(10, 23)))
        later = _chunk(llama, engine, 90, 64, [30, 31, 32, 33, 34, 35])
    flat, layout, singles = build([alone, fresh, later], 16, {})
    assert singles == 1
    assert layout.shape == (1 + 200 + 26, 3, 13, 5)
    tiles = flat[4 * 227 + 3 * 13 :].reshape(-1, 5).tolist()
    first, second, third, fourth = [1, 64, 0, 1, 0], [65, 64, 64, 1, 64], [129, 64, 128, 1, 128], [193, 8, 192, 1, 192]
    assert tiles == [fourth, third, second, [1 + 200, 26, 64, 2, 0], first]
    assert np.array_equal(flat[2 * 227 : 2 * 227 + 3], [16, 0, 1])


async def test_whatever_is_asked_for_the_tokens_are_the_librarys(llama: Checkpoint) -> None:
    async with llama.engine(execution="library") as library:
        expected = [(await _answers(library, name))[0] for name in DRAWS]
    async with llama.engine(execution="fused") as fused:
        alone = [(await _answers(fused, name))[0] for name in DRAWS]
        together = await _answers(fused, *DRAWS)
        assert blocks_used(fused) == 0
    for found in (alone, together):
        assert [one.ids for one in found] == [one.ids for one in expected]
    assert len(together[-1].logprobs) == 40


async def test_a_draw_that_needs_more_candidates_is_made_again_with_all(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("top-p", "greedy", "all three", "temperature")
    async with llama.engine(execution="fused") as fused:
        expected = await _answers(fused, *names)
        monkeypatch.setattr(drawing, "WIDTH", 2)
        found = await _answers(fused, *names)
        assert blocks_used(fused) == 0
    assert [one.ids for one in found] == [one.ids for one in expected]


async def test_a_step_is_started_before_the_one_before_it_has_ended(llama: Checkpoint) -> None:
    async with llama.engine(execution="fused") as engine:
        ahead: list[bool] = []
        start = engine.runner.start

        def watched(chunks: list[Chunk]) -> object:
            ahead.append(any(chunk.sequence.in_flight.ids for chunk in chunks))
            return start(chunks)

        engine.runner.start = watched
        answer = await collect(engine.decode(Prompt((5, 6, 7)), greedy(30)))
    assert len(answer.ids) == 30
    assert ahead == [False] + [True] * 29


async def test_a_stopped_request_gives_back_what_a_step_in_flight_writes_to(llama: Checkpoint, random_ids: Ids) -> None:
    """Another request gets the blocks at once, and must not be disturbed."""
    prompts = [random_ids(50, seed) for seed in range(6)]
    expected = [llama.generate(prompt, 24) for prompt in prompts]
    sampling = replace(greedy(24), ignore_eos=False)
    async with llama.engine(execution="fused", kv_cache_bytes=18 * 12288, max_context_tokens=120) as engine:
        for turn, prompt in enumerate(prompts):
            stream = engine.decode(Prompt(random_ids(40, 90 + turn)), greedy(70))
            for _ in range(turn + 1):
                await stream.__anext__()
            going = asyncio.create_task(collect(engine.decode(Prompt(prompt), sampling)))
            await stream.aclose()
            assert (await going).ids == expected[turn]
        await eventually(lambda: blocks_used(engine) == 0)


async def test_a_model_that_the_fused_steps_do_not_know_is_refused_or_left_to_the_library(
    demo: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.engines.pytorch.model.fused_model.FAMILIES", ("qwen2",))
    with pytest.raises(ConfigError, match="models of type llama are not among qwen2"):
        async with demo.engine(execution="fused"):
            pass
    async with demo.engine(execution="auto") as engine:
        assert isinstance(engine.runner, LibraryRunner)


async def test_graphs_can_be_switched_off_and_a_cpu_has_none(llama: Checkpoint) -> None:
    for graphs in (True, False):
        async with llama.engine(execution="fused", cuda_graphs=graphs) as engine:
            assert engine.runner.has_graphs is (graphs and DEVICE == "cuda")
            assert engine.runner._sizes.graphs is graphs


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: make gpu")
async def test_without_triton_a_gpu_computes_by_the_library(llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.engines.pytorch.runners.selection.find_spec", lambda _name: None)
    async with llama.engine() as engine:
        assert isinstance(engine.runner, LibraryRunner)
        assert (await collect(engine.decode(Prompt((5, 6, 7)), greedy(8)))).ids == llama.generate((5, 6, 7), 8)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: make gpu")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_graphs_give_the_tokens_of_the_same_steps_without_graphs(
    demo: Checkpoint, random_ids: Ids, dtype: str
) -> None:
    prompts = [random_ids(length, length) for length in (1, 5, 16, 40, 100, 300, 7, 70, 33)]

    async def answers(engine: PyTorchEngine) -> list[tuple[int, ...]]:
        found = await asyncio.gather(*(collect(engine.decode(Prompt(prompt), greedy(40))) for prompt in prompts))
        return [one.ids for one in found]

    found = []
    for graphs in (True, False):
        async with demo.engine(dtype=dtype, cuda_graphs=graphs) as engine:
            assert engine.runner.has_graphs is graphs
            found.append(await answers(engine))
    assert found[0] == found[1]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: make gpu")
async def test_in_bfloat16_the_tokens_are_the_librarys(demo: Checkpoint) -> None:
    """With prompts that the checkpoint can answer: for random prompts rounding decides between equally
    likely tokens.
    """
    tokenizer = _tokenizer(demo)
    texts = ["Sort: pear apple mango", "Copy: alpha beta gamma", "Reverse: one two three", "3 + 4 =", "Count to seven."]
    prompts = [tuple(tokenizer.encode(text).ids) for text in texts]
    found: dict[str, list[tuple[int, ...]]] = {}
    for execution in ("library", "fused"):
        async with demo.engine(dtype="bfloat16", execution=execution) as engine:
            answers = [
                await collect(engine.decode(Prompt(prompt), replace(greedy(12), ignore_eos=False)))
                for prompt in prompts
            ]
            found[execution] = [one.ids for one in answers]
    assert found["fused"] == found["library"]


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint.path / "tokenizer.json"))
