"""Adapters of requests and of operators' calls, between messages and the engine."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from baton.engine.v1 import prompt_pb2
from baton.errors import InvalidRequest, Unsupported
from baton.inference.v1 import lora_pb2
from services.engines.base import Engine
from services.engines.lora.inventory import LoraInventory, RankedLora, ServesLoras
from services.engines.prompt import Lora, Prompt


def read_lora(message: prompt_pb2.Prompt) -> Lora | None:
    """Returns the adapter of a prompt, if it has one. Raises InvalidRequest naming an empty field."""
    if not message.HasField("lora"):
        return None
    for field in ("name", "digest"):
        if not getattr(message.lora, field):
            raise InvalidRequest.of(f"prompt.lora.{field}", "is empty")
    return Lora(message.lora.name, message.lora.digest)


def loras_of(engine: Engine | None) -> ServesLoras:
    """Returns the adapters of a worker's engine. Raises Unsupported if it serves none."""
    found = engine.loras if engine is not None else None
    if found is None:
        raise Unsupported("this worker serves no adapters: engine.lora is not configured")
    return found


def require_lora(engine: Engine, prompt: Prompt) -> None:
    """Raises LoraNotHere, or Unsupported, if the prompt's adapter can never be used here."""
    if prompt.lora is not None:
        loras_of(engine).require(prompt.lora)


@asynccontextmanager
async def using_lora(engine: Engine, prompt: Prompt) -> AsyncIterator[None]:
    """Keeps the prompt's adapter in memory while the context is open; entering may load it. Raises as `use`."""
    if prompt.lora is None:
        yield
        return
    async with loras_of(engine).use(prompt.lora):
        yield


def inventory_message(inventory: LoraInventory) -> lora_pb2.LoraInventory:
    """Converts what a worker has to its message."""
    return lora_pb2.LoraInventory(
        loaded=_adapters(inventory.loaded),
        available=_adapters(inventory.available),
        rejected=[lora_pb2.RejectedLora(name=one.name, reason=one.reason) for one in inventory.rejected],
        max_loaded=inventory.max_loaded,
    )


def _adapters(adapters: Sequence[RankedLora]) -> list[lora_pb2.LoraAdapter]:
    return [lora_pb2.LoraAdapter(name=one.lora.name, digest=one.lora.digest, rank=one.rank) for one in adapters]
