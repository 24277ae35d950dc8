"""Engines with a gate at the end of each prompt: all of its steps but the last have been told of."""

import asyncio

import pytest

from services.engines.base import Engine, PromptProgress, ReportsProgress
from services.engines.kv import HeldKv
from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.registry import ENGINES, EngineKind
from services.engines.simulated.config import SimulatedConfig
from services.engines.simulated.engine import SimulatedEngine


class GatedProgress(ReportsProgress):
    """Returns a prompt's KV once `gate` is set."""

    def __init__(self, engine: ReportsProgress) -> None:
        self.gate = asyncio.Event()
        self.telling: PromptProgress | None = None
        self._engine = engine

    async def prefill_reporting(self, prompt: Prompt, sampling: Sampling, progress: PromptProgress) -> HeldKv:
        self.telling = progress
        held = await self._engine.prefill_reporting(prompt, sampling, progress)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            await held.release()
            raise
        return held


class GatedSimulatedEngine(SimulatedEngine):
    """The simulated engine with a gate."""

    gated: GatedProgress

    @property
    def progress(self) -> GatedProgress:  # type: ignore[override]
        return self.gated


class GatedPyTorchEngine(PyTorchEngine):
    """The embedded engine with a gate."""

    gated: GatedProgress

    @property
    def progress(self) -> GatedProgress:  # type: ignore[override]
        return self.gated


def open_gated(monkeypatch: pytest.MonkeyPatch) -> list[GatedProgress]:
    """Makes all simulated and embedded engines gated ones; returns their gates, in the order of their start."""
    opened: list[GatedProgress] = []

    def gated(engine: GatedSimulatedEngine | GatedPyTorchEngine) -> Engine:
        engine.gated = GatedProgress(engine)
        opened.append(engine.gated)
        return engine

    simulated = EngineKind(SimulatedConfig, lambda config, _context: gated(GatedSimulatedEngine(config)))
    embedded = EngineKind(PyTorchConfig, lambda config, _context: gated(GatedPyTorchEngine(config)))
    monkeypatch.setitem(ENGINES, "simulated", simulated)
    monkeypatch.setitem(ENGINES, "pytorch", embedded)
    return opened
