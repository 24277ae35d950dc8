"""Adapters come into memory when they are used, and leave it when nothing uses them any more."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
from support.engines.adapters import save_adapter
from support.engines.embedded import Checkpoint
from support.engines.engine_calls import collect, greedy
from support.eventually import eventually

from baton.errors import BatonError, ConfigError, DeviceFailed, InvalidRequest, LoraNotHere, Overloaded
from services.engines.lora.adapters import LoraAdapters
from services.engines.prompt import Lora, Prompt
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.pytorch.lora.layers import LoraLayers

NAMES = ("one", "three", "two")


@pytest.fixture
def folder(llama: Checkpoint, tmp_path: Path) -> Path:
    for seed, name in enumerate(NAMES):
        save_adapter(tmp_path / "adapters" / name, llama.path, seed=seed, rank=2)
    return tmp_path / "adapters"


def engine_with(llama: Checkpoint, folder: Path, **options: object) -> PyTorchEngine:
    return llama.engine(lora={"folder": folder, "max_loaded": 2, "max_rank": 2, **options})


def loaded(loras: LoraAdapters) -> list[str]:
    return [one.lora.name for one in loras.inventory().loaded]


def lora(loras: LoraAdapters, name: str) -> Lora:
    inventory = loras.inventory()
    return next(one.lora for one in (*inventory.loaded, *inventory.available) if one.lora.name == name)


async def test_the_adapter_whose_last_use_is_longest_ago_makes_room(llama: Checkpoint, folder: Path) -> None:
    async with engine_with(llama, folder, load=("one",)) as engine:
        loras = engine.loras
        assert loras is not None
        for name in ("two", "one", "three"):
            async with loras.use(lora(loras, name)):
                pass
        assert loaded(loras) == ["one", "three"]


async def test_adapters_in_use_are_not_replaced(llama: Checkpoint, folder: Path) -> None:
    async with engine_with(llama, folder) as engine, AsyncExitStack() as stack:
        loras = engine.loras
        assert loras is not None
        for name in ("one", "two"):
            await stack.enter_async_context(loras.use(lora(loras, name)))
        with pytest.raises(Overloaded, match="all 2 places"):
            await stack.enter_async_context(loras.use(lora(loras, "three")))


async def test_unloading_waits_for_users_and_refuses_others_at_once(llama: Checkpoint, folder: Path) -> None:
    async with engine_with(llama, folder) as engine:
        loras = engine.loras
        assert loras is not None
        one = lora(loras, "one")
        async with loras.use(one):
            unloading = asyncio.create_task(loras.unload("one"))
            await eventually(lambda: not loaded(loras))
            with pytest.raises(LoraNotHere):
                loras.require(one)
            assert not unloading.done()
        await unloading
        with pytest.raises(LoraNotHere):
            async with loras.use(one):
                pass
        await loras.load("one")
        assert loaded(loras) == ["one"]


async def test_a_reload_keeps_the_old_content_for_those_that_use_it(llama: Checkpoint, folder: Path) -> None:
    async with engine_with(llama, folder) as engine:
        loras = engine.loras
        assert loras is not None
        old = lora(loras, "one")
        async with loras.use(old):
            slot = loras.slot_of(old)
            save_adapter(folder / "one", llama.path, seed=9, rank=2)
            await loras.load("one")
            new = lora(loras, "one")
            assert new.digest != old.digest
            async with loras.use(new):
                assert loras.slot_of(new) != slot
        with pytest.raises(LoraNotHere):
            loras.require(old)


async def test_a_cancelled_wait_leaves_the_load_to_others(llama: Checkpoint, folder: Path) -> None:
    async with engine_with(llama, folder) as engine:
        loras = engine.loras
        assert loras is not None
        using = loras.use(lora(loras, "one"))
        waiting = asyncio.ensure_future(using.__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        await eventually(lambda: loaded(loras) == ["one"])
        await loras.unload("one")


async def test_files_that_have_changed_unnoticed_are_not_used(llama: Checkpoint, folder: Path) -> None:
    async with engine_with(llama, folder) as engine:
        loras = engine.loras
        assert loras is not None
        one = lora(loras, "one")
        save_adapter(folder / "one", llama.path, seed=9, rank=2)
        with pytest.raises(LoraNotHere, match="its files have changed"):
            async with loras.use(one):
                pass
        assert [(one.name, "changed" in one.reason) for one in loras.inventory().rejected] == [("one", True)]


async def test_an_adapter_for_another_model_is_refused(llama: Checkpoint, demo: Checkpoint, folder: Path) -> None:
    save_adapter(folder / "foreign", demo.path, seed=1, rank=2)
    async with engine_with(llama, folder) as engine:
        assert engine.loras is not None
        with pytest.raises(InvalidRequest, match=r"do not fit the layer|no linear layer"):
            await engine.loras.load("foreign")
        with pytest.raises(InvalidRequest, match="no adapter 'nothing' in the folder"):
            await engine.loras.load("nothing")


async def test_an_adapter_to_load_at_start_that_is_rejected_ends_the_start(llama: Checkpoint, folder: Path) -> None:
    save_adapter(folder / "dora", llama.path, seed=1, rank=2, use_dora=True)
    with pytest.raises(ConfigError, match=r"engine\.lora\.load: dora: use_dora"):
        async with engine_with(llama, folder, load=("dora",)):
            pass


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (RuntimeError("shape mismatch"), (LoraNotHere, InvalidRequest)),
        (torch.OutOfMemoryError("CUDA out of memory"), (Overloaded, Overloaded)),
    ],
)
async def test_an_adapter_that_cannot_be_copied_fails_its_load_and_not_the_engine(
    llama: Checkpoint,
    folder: Path,
    failure: RuntimeError,
    expected: tuple[type[BatonError], type[BatonError]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with engine_with(llama, folder, load=("one",)) as engine:
        loras = engine.loras
        assert loras is not None
        with monkeypatch.context() as patched:
            patched.setattr(LoraLayers, "install", _raising(failure))
            with pytest.raises(expected[0]):
                async with loras.use(lora(loras, "two")):
                    pass
            with pytest.raises(expected[1]):
                await loras.load("three")
        assert loaded(loras) == ["one"]
        assert engine.healthy
        assert len((await collect(engine.decode(Prompt((5, 6, 7)), greedy(4)))).ids) == 4
        await loras.load("three")
        assert loaded(loras) == ["one", "three"]


async def test_a_lost_device_ends_the_engine_also_while_an_adapter_is_loaded(
    llama: Checkpoint, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine_with(llama, folder) as engine:
        loras = engine.loras
        assert loras is not None
        monkeypatch.setattr(LoraLayers, "install", _raising(RuntimeError("CUDA error: device-side assert triggered")))
        with pytest.raises(DeviceFailed):
            await loras.load("one")
        await eventually(lambda: not engine.healthy)


def _raising(failure: RuntimeError) -> Callable[..., None]:
    def install(*_: object) -> None:
        raise failure

    return install
