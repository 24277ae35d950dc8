"""A pipeline on several GPUs: an engine on each, among which drawings are spread."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import Self

from baton.errors import ConfigError
from services.engines.base import EncoderLoad, ModelFacts
from services.engines.diffusers.config import DiffusionConfig
from services.engines.diffusers.engine import DiffusersEngine
from services.engines.diffusion import Clip, Diffuser, Drawing, Picture, Step
from services.engines.pytorch.model.loading import device_named


class ReplicatedEngine(Diffuser):
    """`data_parallel_size` engines (Diffuser). Each drawing is computed by one of them, as by one alone.

    It is unhealthy when one of them is: its process has to be started again.
    """

    def __init__(self, config: DiffusionConfig) -> None:
        one = config.model_copy(update={"data_parallel_size": 1})
        devices = _devices(config)
        self._engines = [DiffusersEngine(one.model_copy(update={"device": device})) for device in devices]

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            # One after the other, since transformers' loading changes defaults of the whole process.
            for engine in self._engines:
                await stack.enter_async_context(engine)
            self._opened = stack.pop_all()
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self._opened.__aexit__(*exception)

    @property
    def facts(self) -> ModelFacts:
        first, *_ = all_facts = [engine.facts for engine in self._engines]
        seconds = sum(facts.load_seconds for facts in all_facts)
        settings = (*first.settings, ("data_parallel_size", str(len(all_facts))))
        return replace(first, load_seconds=seconds, settings=settings)

    @property
    def healthy(self) -> bool:
        return all(engine.healthy for engine in self._engines)

    @property
    def responsive(self) -> bool:
        return all(engine.responsive for engine in self._engines)

    def load(self) -> EncoderLoad:
        loads = [engine.load() for engine in self._engines]
        return EncoderLoad(sum(load.running for load in loads), sum(load.waiting for load in loads))

    def predicted_seconds(self, drawings: Sequence[Drawing]) -> float | None:
        """The shortest time of one engine: the drawings go to different engines. See Diffuser."""
        each = drawings[: -(-len(drawings) // len(self._engines))]
        predicted = [engine.predicted_seconds(each) for engine in self._engines]
        return min((seconds for seconds in predicted if seconds is not None), default=None)

    def draw(self, drawing: Drawing) -> AsyncGenerator[Step | Picture | Clip, None]:
        """Draws by the healthy engine with the fewest drawings. See Diffuser."""
        return min(self._engines, key=_preference).draw(drawing)


def _preference(engine: DiffusersEngine) -> tuple[bool, int]:
    """One that has failed has no drawings: it would get, and fail, all of them until the process ends."""
    load = engine.load()
    return not engine.healthy, load.running + load.waiting


def _devices(config: DiffusionConfig) -> list[str]:
    """Raises ConfigError if there are not as many GPUs."""
    size, device = config.data_parallel_size, device_named(config.device)
    if device.type == "cpu":
        return ["cpu"] * size
    if size > torch.cuda.device_count():
        raise ConfigError(f"engine.data_parallel_size: {size}, and this process sees {torch.cuda.device_count()} GPUs")
    return [f"cuda:{index}" for index in range(size)]
