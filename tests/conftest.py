"""Fixtures that all tests share. This file also puts tests/ on the import path, for `support`."""

import gc
from collections.abc import Generator, Iterator

import pytest
from support import at_once
from support.cluster.server_kind import choose_server
from support.engines.device import share_the_machine
from support.servers.etcd import EtcdServer

from runtime.garbage import exempt_living_objects

choose_server()
share_the_machine()

# Python's own are 700, 10 and 10: a tenth of what tests of the router compute, more than half of reading all sources.
_COLLECTIONS = (10_000, 5, 5)


# What takes longest begins first, or one process would end with it while the others have nothing left. The faults lead:
# they wait for most of their time, and the process that has them leaves the processor to the others.
LONGEST = (
    "tests/faults/",
    "tests/simulation/test_",
    "tests/services/sleeping/test_sleepers_kept_decodes.py",
    "tests/services/engines/diffusers/test_drawing_ranks.py",
    "tests/services/engines/pytorch/kv_cache/test_kept_cache.py",
    "tests/deploy/test_restart_behind_envoy.py",
    "tests/services/engines/pytorch/test_device_faults.py",
    "tests/e2e/",
    "tests/examples/",
)


@pytest.hookimpl(optionalhook=True)  # where pytest-xdist is not installed, as in .venv-vllm
def pytest_xdist_auto_num_workers() -> int:
    """The number of processes for `-n auto`."""
    return at_once.here()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting tests leaves next to no garbage, and the collector would look at all imports again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests stay in the order of their files beside that, for the fixtures that those share."""
    items.sort(key=lambda item: [not item.nodeid.startswith(prefix) for prefix in LONGEST])


def pytest_collection_finish() -> None:
    """Exempts the imports' objects from each full garbage collection, and has fewer collections: tests end soon."""
    exempt_living_objects()
    gc.set_threshold(*_COLLECTIONS)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Shows the tables of the faults that were survived, too: the losses, the outcomes and the seconds of each."""
    for report in terminalreporter.getreports("passed"):
        if report.nodeid.startswith("tests/faults/") and report.capstdout:
            terminalreporter.write_sep("_", report.head_line)
            terminalreporter.write_line(report.capstdout)


@pytest.fixture(scope="module", autouse=True)
def exempt_from_collection() -> None:
    """The same for what earlier modules of tests left behind: libraries loaded late, processes' results, caches."""
    exempt_living_objects()


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """An etcd that all tests share; no test breaks it."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd") / "shared")
    server.start()
    yield server
    server.stop()
