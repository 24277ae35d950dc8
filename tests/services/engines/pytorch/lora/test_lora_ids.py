"""Greedy ids with adapters equal those of transformers' model with the adapter merged into its weights by `peft`."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.engines.adapters import ATTENTION, merged, save_adapter
from support.engines.checkpoints import PlainModel
from support.engines.embedded import Checkpoint
from support.engines.engine_calls import collect, disaggregated, greedy

from services.engines.prompt import Lora, Prompt
from services.engines.pytorch.engine import PyTorchEngine

Ids = Callable[[int, int], tuple[int, ...]]
TOKENS = 12


@dataclass(frozen=True)
class Adapted:
    """A checkpoint, a folder of adapters for it, and the merged models by name; "" is the model itself."""

    checkpoint: Checkpoint
    folder: Path
    plain: dict[str, PlainModel]

    def engine(self, **options: object) -> PyTorchEngine:
        return self.checkpoint.engine(lora={"folder": self.folder, **options})


def adapted(checkpoint: Checkpoint, folder: Path) -> Adapted:
    model = checkpoint.path
    made = [
        save_adapter(folder / "everywhere", model, seed=1),
        save_adapter(folder / "attention", model, seed=2, rank=8, targets=ATTENTION),
        save_adapter(folder / "rslora", model, seed=3, rank=2, use_rslora=True, lora_alpha=3),
    ]
    plain = {one.name: merged(model, one) for one in made}
    return Adapted(checkpoint, folder, {"": checkpoint.plain, **plain})


@pytest.fixture(scope="module")
def llama_adapted(llama: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return adapted(llama, tmp_path_factory.mktemp("llama-adapters"))


@pytest.fixture(scope="module")
def demo_adapted(demo: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return adapted(demo, tmp_path_factory.mktemp("demo-adapters"))


def lora_of(engine: PyTorchEngine, name: str) -> Lora | None:
    assert engine.loras is not None
    inventory = engine.loras.inventory()
    known = {one.lora.name: one.lora for one in (*inventory.loaded, *inventory.available)}
    return known[name] if name else None


@pytest.mark.parametrize("model", ["llama_adapted", "demo_adapted"])
async def test_different_adapters_in_one_batch(model: str, request: pytest.FixtureRequest, random_ids: Ids) -> None:
    made: Adapted = request.getfixturevalue(model)
    prompts = [random_ids(length, length) for length in (3, 40, 17)]
    jobs = [(name, prompt) for prompt in prompts for name in made.plain]
    expected = [made.plain[name].generate(prompt, TOKENS) for name, prompt in jobs]
    answers = {tuple(expected[start :: len(made.plain)]) for start in range(len(made.plain))}
    assert len(answers) == len(made.plain)
    async with made.engine(load=("rslora",)) as engine, AsyncExitStack() as stack:
        assert engine.loras is not None
        loras = {name: lora_of(engine, name) for name in made.plain}
        for lora in filter(None, loras.values()):
            await stack.enter_async_context(engine.loras.use(lora))
        sampling = greedy(TOKENS)
        found = await asyncio.gather(
            *(collect(engine.decode(Prompt(prompt, lora=loras[name]), sampling)) for name, prompt in jobs)
        )
    for one, ids in zip(found, expected, strict=True):
        assert one.ids[: len(ids)] == ids


async def test_prefilled_on_one_engine_and_decoded_on_another(llama_adapted: Adapted, random_ids: Ids) -> None:
    prompt = random_ids(50, 5)
    async with llama_adapted.engine() as prefill, llama_adapted.engine() as decode:
        lora = lora_of(prefill, "everywhere")
        assert lora is not None
        assert prefill.loras is not None
        assert decode.loras is not None
        async with prefill.loras.use(lora), decode.loras.use(lora):
            rest = await disaggregated(prefill, decode, Prompt(prompt, lora=lora), greedy(TOKENS))
    assert rest == llama_adapted.plain["everywhere"].generate(prompt, TOKENS)[1:]


async def test_prefixes_are_shared_within_an_adapter_only(llama_adapted: Adapted, random_ids: Ids) -> None:
    prompt = random_ids(64, 9)
    async with llama_adapted.engine() as engine, AsyncExitStack() as stack:
        assert engine.loras is not None
        cached = []
        for name in ("", "everywhere", "attention", "everywhere", ""):
            lora = lora_of(engine, name)
            if lora is not None:
                await stack.enter_async_context(engine.loras.use(lora))
            cached.append((await collect(engine.decode(Prompt(prompt, lora=lora), greedy(2)))).finished.cached_tokens)
    assert cached == [0, 0, 0, 48, 48]
