"""Adapters that vLLM is given, without vLLM: copies of their content, one number each, and no one that does not fit."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.engines.adapters import ATTENTION, save_adapter
from support.engines.checkpoints import save_qwen3

from baton.errors import ConfigError, EngineFailed
from services.engines.lora.catalog import Catalog, read_catalog
from services.engines.lora.peft_folder import WEIGHTS
from services.engines.vllm.lora_slots import VllmLoraSlots, linear_shapes
from services.engines.vllm.package import VllmPackage


class Dead(Exception):
    """vLLM's core has ended."""


class VllmLoras:
    """The adapters inside vLLM: adapters by their numbers. It refuses the next call with `error`."""

    def __init__(self) -> None:
        self.here: dict[int, Any] = {}
        self.error: Exception | None = None

    async def add_lora(self, request: Any) -> bool:
        if self.error is not None:
            raise self.error
        assert (Path(request.lora_path) / WEIGHTS).is_file()
        self.here[request.lora_int_id] = request
        return True

    async def remove_lora(self, number: int) -> bool:
        return self.here.pop(number, None) is not None


def _exists(request: Any) -> bool:
    return Path(request.lora_path).exists()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("model"), 32)


@pytest.fixture
def catalog(checkpoint: Path, tmp_path: Path) -> Catalog:
    for seed, name in enumerate(("one", "two")):
        save_adapter(tmp_path / name, checkpoint, seed=seed, targets=ATTENTION)
    return read_catalog(tmp_path, 8)


@pytest.fixture
def llm() -> VllmLoras:
    return VllmLoras()


@pytest.fixture
def slots(llm: VllmLoras, checkpoint: Path) -> Iterator[VllmLoraSlots]:
    package = cast(VllmPackage, SimpleNamespace(lora_request=SimpleNamespace, dead_error=Dead))
    with VllmLoraSlots(llm, package, linear_shapes(checkpoint), 8) as found:
        yield found


async def test_vllm_gets_a_copy_that_the_adapters_folder_does_not_change(
    slots: VllmLoraSlots, llm: VllmLoras, catalog: Catalog
) -> None:
    entry = catalog.entries["one"]
    content = (entry.folder / WEIGHTS).read_bytes()
    await slots.install(0, slots.read(entry))
    (entry.folder / WEIGHTS).write_bytes(b"other")
    [request] = llm.here.values()
    assert (Path(request.lora_path) / WEIGHTS).read_bytes() == content
    assert request.lora_name == entry.ranked.lora.seed
    assert slots.request(entry.ranked.lora) is request


async def test_another_adapter_in_a_slot_takes_the_old_one_out_of_vllm(
    slots: VllmLoraSlots, llm: VllmLoras, catalog: Catalog
) -> None:
    await slots.install(0, slots.read(catalog.entries["one"]))
    [old] = llm.here.values()
    await slots.install(0, slots.read(catalog.entries["two"]))
    assert [each.lora_name for each in llm.here.values()] == [catalog.entries["two"].ranked.lora.seed]
    assert not _exists(old)


async def test_content_in_two_slots_stays_until_both_are_clear(
    slots: VllmLoraSlots, llm: VllmLoras, catalog: Catalog
) -> None:
    for slot in (0, 1):
        await slots.install(slot, slots.read(catalog.entries["one"]))
    assert len(llm.here) == 1
    await slots.clear(0)
    assert len(llm.here) == 1
    await slots.clear(1)
    assert llm.here == {}


@pytest.mark.parametrize(("error", "kind"), [(ValueError("rank"), ConfigError), (Dead("core"), EngineFailed)])
async def test_a_refusal_of_vllm_is_told_apart_from_its_end(
    slots: VllmLoraSlots, llm: VllmLoras, catalog: Catalog, error: Exception, kind: type[Exception]
) -> None:
    llm.error = error
    with pytest.raises(kind):
        await slots.install(0, slots.read(catalog.entries["one"]))
    llm.error = None
    await slots.install(0, slots.read(catalog.entries["one"]))
    assert len(llm.here) == 1


def test_an_adapter_of_other_layers_is_refused_by_name(slots: VllmLoraSlots, checkpoint: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path / "other", checkpoint, seed=3, targets=["q_proj"], layers="model.decoder.layers")
    with pytest.raises(ConfigError, match=r"model\.decoder\.layers\.0\.self_attn\.q_proj"):
        slots.read(read_catalog(tmp_path, 8).entries["other"])


def test_files_that_have_changed_since_the_folder_was_read_are_refused(
    slots: VllmLoraSlots, checkpoint: Path, catalog: Catalog
) -> None:
    entry = catalog.entries["one"]
    save_adapter(entry.folder, checkpoint, seed=9, targets=ATTENTION)
    with pytest.raises(ConfigError, match="have changed"):
        slots.read(entry)


def test_a_checkpoint_without_linear_layers_serves_no_adapters(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no linear layers"):
        linear_shapes(tmp_path)
