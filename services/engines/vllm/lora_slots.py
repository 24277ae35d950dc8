"""Places for adapters inside vLLM. Its own LoRA support computes them; a slot here is one of the adapters that it has.

vLLM reads an adapter from its folder, also again if it has dropped it. So it gets a copy of the content that a request
names, whose files nothing changes. The copy's folder and the adapter's name in vLLM contain the digest: both are in
vLLM's own keys of prefix blocks, so that blocks of other content are never found.
"""

import itertools
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from baton.errors import BatonError, ConfigError, EngineFailed
from runtime.aio import timeout
from services.engines.lora.catalog import CatalogEntry
from services.engines.lora.peft_folder import CONFIG, WEIGHTS, LowRank, read_adapter
from services.engines.prompt import Lora
from services.engines.vllm.package import VllmPackage

_LOAD_SECONDS = 300.0
# The layers whose adapters have been compared. vLLM skips modules that it does not know, and so would answer otherwise.
_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class CopiedLora:
    """An adapter's content, copied to a folder of the engine's own."""

    lora: Lora
    folder: Path


class VllmLoraSlots:
    """LoraSlots of one engine. Entering makes the folder of the copies, leaving removes it.

    `shapes` are those of the model's linear layers, `[out, in]`, by name: matrices that do not fit would end vLLM.
    """

    def __init__(self, llm: Any, package: VllmPackage, shapes: Mapping[str, tuple[int, int]], max_rank: int) -> None:
        self._llm = llm
        self._package = package
        self._shapes = shapes
        self._max_rank = max_rank
        self._numbers = itertools.count(1)
        self._slots: dict[int, CopiedLora] = {}
        self._requests: dict[Lora, Any] = {}

    def __enter__(self) -> "VllmLoraSlots":
        self._copies = Path(tempfile.mkdtemp(prefix="baton-vllm-adapters-"))
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._copies, ignore_errors=True)

    def read(self, entry: CatalogEntry) -> CopiedLora:
        lora = entry.ranked.lora
        copy = Path(tempfile.mkdtemp(dir=self._copies))
        try:
            for name in (CONFIG, WEIGHTS):
                shutil.copyfile(entry.folder / name, copy / name)
            check_fits(read_adapter(copy, self._max_rank, lora.digest), self._shapes)
        except OSError as error:
            shutil.rmtree(copy, ignore_errors=True)
            raise ConfigError(f"the adapter's files cannot be copied: {error.strerror}") from error
        except BatonError:
            shutil.rmtree(copy, ignore_errors=True)
            raise
        return CopiedLora(lora, copy)

    async def install(self, slot: int, weights: CopiedLora) -> None:
        """Installs the weights in the slot. Raises EngineFailed if vLLM has ended."""
        await self.clear(slot)
        if weights.lora in self._requests:
            # Under another slot, of an operator's unload that waits for its users.
            shutil.rmtree(weights.folder, ignore_errors=True)
        else:
            await self._add(weights)
        self._slots[slot] = weights

    async def clear(self, slot: int) -> None:
        cleared = self._slots.pop(slot, None)
        if cleared is None or any(each.lora == cleared.lora for each in self._slots.values()):
            return
        request = self._requests.pop(cleared.lora)
        await self._call(self._llm.remove_lora(request.lora_int_id), cleared.lora)
        shutil.rmtree(request.lora_path, ignore_errors=True)

    def request(self, lora: Lora) -> Any:
        """vLLM's LoRARequest of an adapter that is in a slot."""
        return self._requests[lora]

    async def _add(self, copied: CopiedLora) -> None:
        lora = copied.lora
        folder = copied.folder.rename(self._copies / f"{lora.digest}-{lora.name}")
        request = self._package.lora_request(
            lora_name=lora.seed, lora_int_id=next(self._numbers), lora_path=str(folder)
        )
        try:
            await self._call(self._llm.add_lora(request), lora)
        except BatonError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._requests[lora] = request

    async def _call(self, call: Any, lora: Lora) -> None:
        try:
            async with timeout(_LOAD_SECONDS):
                await call
        except TimeoutError as error:
            raise EngineFailed(f"vLLM did not answer within {_LOAD_SECONDS} s about the adapter {lora.name}") from error
        except self._package.dead_error as error:
            raise EngineFailed(f"vLLM has ended: {error}") from error
        except Exception as error:  # vLLM raises no narrower class for what its core refuses
            raise ConfigError(f"vLLM refuses the adapter: {_last_line(error)}") from error


def linear_shapes(checkpoint: Path) -> dict[str, tuple[int, int]]:
    """Returns the shapes `[out, in]` of a checkpoint's linear layers that may have adapters, by name. Blocking.

    Raises ConfigError if there are none: the checkpoint is quantized, or not in safetensors.
    """
    shapes: dict[str, tuple[int, int]] = {}
    try:
        for path in sorted(checkpoint.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    layer = name.removesuffix(".weight")
                    if layer != name and layer.endswith(_LAYERS) and ".experts." not in layer:
                        rows, columns = file.get_slice(name).get_shape()
                        shapes[layer] = (rows, columns)
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(f"engine.lora: {checkpoint}: the weights cannot be read: {error}") from error
    if not shapes:
        raise ConfigError(f"engine.lora: {checkpoint} has no linear layers in safetensors that adapters could change")
    return shapes


def check_fits(matrices: Mapping[str, LowRank], shapes: Mapping[str, tuple[int, int]]) -> None:
    """Raises ConfigError naming the module that the model does not have, or whose shape differs."""
    for module, pair in matrices.items():
        if module not in shapes:
            raise ConfigError(f"{module}: no linear layer of the language model that can have an adapter")
        rows, columns = shapes[module]
        if (pair.down.shape[1], pair.up.shape[0]) != (columns, rows):
            raise ConfigError(f"{module}: the adapter's matrices do not fit the layer, which is {[rows, columns]}")


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
