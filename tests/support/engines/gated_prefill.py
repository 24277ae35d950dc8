"""The simulated engine with a gate at the end of each prompt: all of its steps but the last have been told of."""

import asyncio

import pytest

from services.engines.base import PromptProgress
from services.engines.kv import HeldKv
from services.engines.prompt import Prompt, Sampling
from services.engines.registry import ENGINES, EngineKind
from services.engines.simulated.config import SimulatedConfig
from services.engines.simulated.engine import SimulatedEngine


class GatedPrefill(SimulatedEngine):
    """Returns a prompt's KV once `gate` is set."""

    def __init__(self, config: SimulatedConfig) -> None:
        super().__init__(config)
        self.gate = asyncio.Event()
        self.telling: PromptProgress | None = None

    async def prefill_telling(self, prompt: Prompt, sampling: Sampling, progress: PromptProgress | None) -> HeldKv:  # type: ignore[override]
        self.telling = progress
        held = await super().prefill_telling(prompt, sampling, progress)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            await held.release()
            raise
        return held


def open_gated(monkeypatch: pytest.MonkeyPatch) -> list[GatedPrefill]:
    """Makes all simulated engines gated ones; returns them, in the order of their start."""
    opened: list[GatedPrefill] = []

    def open_one(config: SimulatedConfig, _context: object) -> GatedPrefill:
        opened.append(GatedPrefill(config))
        return opened[-1]

    monkeypatch.setitem(ENGINES, "simulated", EngineKind(SimulatedConfig, open_one))
    return opened
