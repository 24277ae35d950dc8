"""Fixtures that all tests share. This file also puts tests/ on the import path, for `support`."""

from collections.abc import Iterator

import pytest
from support import trtllm
from support.etcd_server import EtcdServer


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """An etcd that all tests share; nobody breaks it."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd") / "shared")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def real_trtllm() -> None:
    """For tests on the real TensorRT-LLM: skipped, saying why, where it cannot run."""
    trtllm.require_real()
