"""Small random checkpoints for the embedded engine, and the plain library model of each."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from support.checkpoints import DEMO, PlainModel, save_llama, save_qwen3

from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.engine import PyTorchEngine


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder, and what the plain library makes of it."""

    path: Path
    plain: PlainModel
    _known: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = field(default_factory=dict)

    def generate(self, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
        """The plain library's greedy ids, computed once a session."""
        key = (prompt, max_tokens)
        if key not in self._known:
            self._known[key] = self.plain.generate(prompt, max_tokens)
        return self._known[key]

    def config(self, **options: object) -> PyTorchConfig:
        """A configuration for this checkpoint, on the CPU, with one thread."""
        defaults: dict[str, object] = {"device": "cpu", "threads": 1, "kv_cache_bytes": 64 << 20}
        return PyTorchConfig.model_validate({"model": self.path, **defaults, **options})

    def engine(self, **options: object) -> PyTorchEngine:
        """An engine of this checkpoint."""
        return PyTorchEngine(self.config(**options))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Small models gain nothing from more, and lose much where other tests run beside them."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = save_llama(tmp_path_factory.mktemp("llama"))
    return Checkpoint(path, PlainModel(path))


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = save_qwen3(tmp_path_factory.mktemp("qwen3"))
    return Checkpoint(path, PlainModel(path))


@pytest.fixture(scope="session")
def demo() -> Checkpoint:
    return Checkpoint(DEMO, PlainModel(DEMO))


@pytest.fixture(params=["llama", "qwen3", "demo"])
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    """Each of them in turn."""
    found: Checkpoint = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def random_ids() -> Callable[[int, int], tuple[int, ...]]:
    """`random_ids(length, seed)`: ids that every test vocabulary has, without the special ones."""
    import random

    return lambda length, seed: tuple(random.Random(seed).choices(range(8, 250), k=length))
