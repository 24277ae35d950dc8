"""Small random checkpoints for the embedded engine, each with the plain library model."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.engines.checkpoints import DEMO, PlainModel, save_llama, save_qwen3
from support.engines.embedded import Checkpoint


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """More threads do not speed up small models, and slow down tests that run at the same time."""
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


@pytest.fixture(scope="session")
def llama_fused(llama: Checkpoint) -> Checkpoint:
    """The Llama, computed by the fused model: on a CPU by its operations in plain PyTorch."""
    return replace(llama, execution="fused")


@pytest.fixture(scope="session")
def qwen3_fused(qwen3: Checkpoint) -> Checkpoint:
    return replace(qwen3, execution="fused")


@pytest.fixture(scope="session")
def demo_fused(demo: Checkpoint) -> Checkpoint:
    return replace(demo, execution="fused")


@pytest.fixture(params=["llama", "qwen3", "demo", "llama_fused", "qwen3_fused", "demo_fused"])
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    """Each checkpoint in turn."""
    found: Checkpoint = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def random_ids() -> Callable[[int, int], tuple[int, ...]]:
    """`random_ids(length, seed)` returns ids that every test vocabulary has, without special ids."""
    return lambda length, seed: tuple(random.Random(seed).choices(range(8, 250), k=length))
