"""The embedded engine on a checkpoint, and the plain library model to compare it with."""

from dataclasses import dataclass, field
from pathlib import Path

from support.engines.checkpoints import PlainModel
from support.engines.device import EXECUTION, ON_DEVICE

from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.engine import PyTorchEngine


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder, and the plain library's model of it."""

    path: Path
    plain: PlainModel
    execution: str = EXECUTION
    _known: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = field(default_factory=dict)

    def generate(self, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
        """The plain library's greedy ids, computed once a session."""
        key = (prompt, max_tokens)
        if key not in self._known:
            self._known[key] = self.plain.generate(prompt, max_tokens)
        return self._known[key]

    def config(self, **options: object) -> PyTorchConfig:
        """A configuration for this checkpoint, on the device of this test run, with one thread."""
        defaults: dict[str, object] = {
            **ON_DEVICE,
            "execution": self.execution,
            "threads": 1,
            "kv_cache_bytes": 64 << 20,
        }
        return PyTorchConfig.model_validate({"model": self.path, **defaults, **options})

    def engine(self, **options: object) -> PyTorchEngine:
        """An engine of this checkpoint."""
        return PyTorchEngine(self.config(**options))
