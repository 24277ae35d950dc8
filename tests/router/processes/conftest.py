"""A worker in this process, and routers of two processes in front of it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from support.cluster.processes import process
from support.cluster.several_processes import SeveralProcesses
from support.lifetimes import in_a_thread
from support.servers.etcd import free_port

from discovery.config import RegistryConfig
from services.config import WorkerConfig
from services.engines.simulated.config import SimulatedConfig
from services.server import host_worker

StartRouter = Callable[..., AbstractContextManager[SeveralProcesses]]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A registry with one worker that runs prompts and generates 50 tokens a second, as overrides have it."""
    folder = tmp_path_factory.mktemp("registry")
    config = WorkerConfig(
        roles=("prefill", "decode"),
        engine=SimulatedConfig(name="demo", num_blocks=4096, decode_step_seconds=0.02),
        registry=RegistryConfig(kind="file", folder=folder, lease_ttl_seconds=60, poll_seconds=0.1),
        drain_seconds=0,
    )
    with in_a_thread(host_worker(config)):
        yield f"registry={{kind: file, folder: {folder}, lease_ttl_seconds: 60, poll_seconds: 0.1}}"


@pytest.fixture(scope="module")
def start(registry: str, tmp_path_factory: pytest.TempPathFactory) -> StartRouter:
    """Starts a router of two processes; both serve when the context opens."""

    @contextmanager
    def start_router(*overrides: str) -> Iterator[SeveralProcesses]:
        metrics = f"127.0.0.1:{free_port()}"
        own = [registry, "processes=2", f"metrics_listen={metrics}", "log.format=json", "probe.timeout_seconds=20"]
        log = tmp_path_factory.mktemp("router") / "log"
        with process("router", "router.yaml", [*own, *overrides], log) as started:
            started.wait_until_serving()
            yield SeveralProcesses(started, metrics)

    return start_router


@pytest.fixture(scope="module")
def router(start: StartRouter) -> Iterator[SeveralProcesses]:
    """One that the tests of a module share."""
    with start() as running:
        yield running
