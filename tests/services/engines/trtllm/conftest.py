"""A checkpoint with tiny weights, and every version of the stand-in."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engines import trtllm
from support.engines.checkpoints import save_llama


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("trtllm-llama"))


@pytest.fixture(params=trtllm.VERSIONS)
def version(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each version in turn, installed."""
    with trtllm.trtllm(request.param):
        yield request.param


@pytest.fixture
def newest() -> Iterator[None]:
    """The newest version only, for tests that do not depend on the version."""
    with trtllm.trtllm(trtllm.VERSIONS[-1]):
        yield


@pytest.fixture
def real_trtllm() -> None:
    """For tests on the real TensorRT-LLM: skipped, saying why, where it cannot run."""
    trtllm.require_real()
