"""The skeleton of a part that computes batches on a thread, and is tested while it is idle."""

import asyncio
import time
from typing import Any, Generic, Protocol, TypeVar

from typing_extensions import Self

from services.engines.base import EncoderLoad, EnginePart, ModelFacts
from services.engines.pytorch.batch_loop import BatchLoop
from services.engines.running.canary import Canary


class PartConfig(Protocol):
    """The part of a configuration that says how it is tested while it is idle."""

    @property
    def canary_seconds(self) -> float | None: ...

    @property
    def canary_patience_seconds(self) -> float: ...


Config = TypeVar("Config", bound=PartConfig)
Loop = TypeVar("Loop", bound=BatchLoop[Any])


class PyTorchPart(EnginePart, Generic[Config, Loop]):
    """A subclass loads its model by `_load`, in a thread, and makes its loop and facts of it."""

    _loop: Loop

    def __init__(self, config: Config) -> None:
        self._config = config

    def _load(self) -> None:
        raise NotImplementedError

    def _new_loop(self) -> Loop:
        raise NotImplementedError

    def _new_facts(self, load_seconds: float) -> ModelFacts:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        began, config = time.monotonic(), self._config
        await asyncio.to_thread(self._load)
        self._facts = self._new_facts(time.monotonic() - began)
        self._loop = self._new_loop()
        await self._loop.__aenter__()
        self._canary = Canary(
            self._loop.test, lambda: self._loop.quiet_seconds, config.canary_seconds, config.canary_patience_seconds
        )
        await self._canary.__aenter__()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self._canary.__aexit__(kind, error, trace)
        await self._loop.__aexit__(kind, error, trace)

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def healthy(self) -> bool:
        """False after a fatal error, and while the thread hangs."""
        return self._loop.healthy and not self._canary.is_overdue

    @property
    def responsive(self) -> bool:
        """False also while a test request takes far longer than usual."""
        return self.healthy and not self._canary.is_late

    def load(self) -> EncoderLoad:
        return self._loop.load
