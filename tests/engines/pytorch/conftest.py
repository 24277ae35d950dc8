"""Small random checkpoints for the embedded engine, and the plain library model of each."""

import random
from collections.abc import Callable

import pytest
import torch
from support.checkpoints import DEMO, PlainModel, save_llama, save_qwen3
from support.embedded import Checkpoint


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
    return lambda length, seed: tuple(random.Random(seed).choices(range(8, 250), k=length))
