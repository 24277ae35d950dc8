"""A real etcd server to break, and registries on it."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from support.servers.etcd import EtcdServer

from discovery.etcd import EtcdConfig, EtcdRegistry

# The shortest lease that etcd grants.
TTL_SECONDS = 2

OpenEtcd = Callable[..., AbstractAsyncContextManager[EtcdRegistry]]


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd of the test's own, to kill, freeze and wipe."""
    server = EtcdServer(tmp_path / "own")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test uses."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def open_etcd(namespace: str) -> OpenEtcd:
    """Opens a registry on `endpoints` in the test's namespace, with short times."""

    def open_(*endpoints: str, ttl_seconds: int = TTL_SECONDS, **more: object) -> EtcdRegistry:
        times = {"call_timeout_seconds": 0.5, "start_timeout_seconds": 60.0}
        config = EtcdConfig.model_validate({"endpoints": endpoints, **times, **more})
        return EtcdRegistry(config, namespace, ttl_seconds)

    return open_
