"""A registry in a shared folder: processes that die, folders that go away, and files that Baton did not write."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.clock import ManualClock
from support.eventually import eventually
from support.router.worker_views import Views, worker

from baton.errors import ConfigError, Unavailable
from discovery.file import FileRegistry
from discovery.file.folder import Lifetimes

TTL_SECONDS = 3.0
NAMESPACE = "demo"

# Registers a worker, or allocates an id, says so, and stays.
HOLDER = """
import asyncio, sys
from pathlib import Path
from discovery.file import FileRegistry
from support.router.worker_views import worker

async def main(folder, what):
    async with FileRegistry(Path(folder), "demo", 1.0) as registry:
        entry = registry.register(worker("w1")) if what == "worker" else registry.allocate_id("node", 1)
        async with entry:
            print("ready", flush=True)
            await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""

Open = Callable[..., FileRegistry]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "registry"


@pytest.fixture
def open_file(root: Path) -> Open:
    def open_(folder: Path = root, start_timeout_seconds: float = 60, **more: float) -> FileRegistry:
        timeouts = {"poll_seconds": 0.02, "start_timeout_seconds": start_timeout_seconds}
        return FileRegistry(folder, NAMESPACE, TTL_SECONDS, **timeouts, **more)

    return open_


def workers_folder(root: Path) -> Path:
    return root / "baton" / NAMESPACE / "workers"


def start_holder(root: Path, what: str) -> "subprocess.Popen[bytes]":
    """A process that holds a worker's registration or an id. It has it when this returns."""
    path = os.pathsep.join(sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root), what], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def replace_by_a_file(root: Path, away: Path) -> None:
    root.rename(away)
    root.write_text("not a folder")


def put_back(root: Path, away: Path) -> None:
    root.unlink()
    away.rename(root)


async def test_a_killed_worker_is_removed_after_its_lease(root: Path, open_file: Open) -> None:
    process = await asyncio.to_thread(start_holder, root, "worker")
    async with open_file() as registry, Views(registry) as views:
        await views.until_ids("w1")
        process.kill()
        began = time.monotonic()
        process.wait()
        await views.until_ids()
        assert time.monotonic() - began > 0.2 * TTL_SECONDS


async def test_a_paused_worker_comes_back(root: Path, open_file: Open) -> None:
    process = await asyncio.to_thread(start_holder, root, "worker")
    try:
        async with open_file() as registry, Views(registry) as views:
            await views.until_ids("w1")
            process.send_signal(signal.SIGSTOP)
            await views.until_ids()
            process.send_signal(signal.SIGCONT)
            await views.until_ids("w1")
    finally:
        process.kill()
        process.wait()


async def test_the_id_of_a_killed_process_is_free_after_its_lease(root: Path, open_file: Open) -> None:
    process = await asyncio.to_thread(start_holder, root, "id")
    async with open_file(start_timeout_seconds=1) as registry:
        with pytest.raises(Unavailable, match="all 1 ids are in use"):
            async with registry.allocate_id("node", 1):
                pass
        process.kill()
        process.wait()
    async with open_file() as registry, registry.allocate_id("node", 1) as allocated:
        assert allocated.value == 0


async def test_a_removed_folder_is_written_again_and_no_worker_is_removed(root: Path, open_file: Open) -> None:
    async with open_file() as registry, Views(registry) as views, registry.register(worker("w1")) as registration:
        await views.until_ids("w1")
        for file in workers_folder(root).iterdir():
            file.unlink()
        workers_folder(root).rmdir()
        await eventually(lambda: workers_folder(root).is_dir() and any(workers_folder(root).glob("w1@*")))
        await asyncio.sleep(1.5 * TTL_SECONDS)  # longer than removals are held
        assert registration.registered
        assert all(tuple(one.worker_id for one in view) == ("w1",) for view in views.all if view)
        assert views.all[-1] == (worker("w1"),)


async def test_while_the_folder_is_away_the_view_stays(root: Path, open_file: Open) -> None:
    async with open_file() as registry, Views(registry) as views, registry.register(worker("w1")) as registration:
        await views.until_ids("w1")
        away = root.with_name("away")
        replace_by_a_file(root, away)
        await eventually(lambda: not registration.registered)
        await asyncio.sleep(TTL_SECONDS)
        assert views.all[-1] == (worker("w1"),)
        put_back(root, away)
        await eventually(lambda: registration.registered)
        await registration.update(replace(worker("w1"), draining=True))
        await views.until(lambda workers: workers == (replace(worker("w1"), draining=True),))
        assert () not in views.all[1:]


async def test_a_folder_that_cannot_be_had_is_unavailable(open_file: Open) -> None:
    async with open_file(Path(__file__), start_timeout_seconds=3) as registry:
        with pytest.raises(Unavailable, match=r"not registered within 3 s: registry folder .*Not a directory"):
            async with registry.register(worker("w1")):
                pass


async def test_files_that_are_no_records_are_ignored(root: Path, open_file: Open, tmp_path: Path) -> None:
    folder = workers_folder(root)
    folder.mkdir(parents=True)
    (folder / "w2@1.aa.json").write_text("{")
    (folder / "w3@1.aa.json").write_bytes(worker("w4").to_json())
    (folder / "w5@1.aa.json").write_bytes(b" " * 2_000_000)
    (folder / "notes.txt").write_bytes(worker("w6").to_json())
    os.mkfifo(folder / "w7@1.aa.json")
    (tmp_path / "record").write_bytes(worker("w8").to_json())
    (folder / "w8@1.aa.json").symlink_to(tmp_path / "record")
    async with open_file() as registry, Views(registry) as views, registry.register(worker("w1")):
        await views.until_ids("w1")
        assert {one.worker_id for view in views.all for one in view} == {"w1"}


@pytest.mark.parametrize("namespace", [".", ".."])
def test_a_namespace_that_leads_out_of_the_folder_is_refused(root: Path, namespace: str) -> None:
    with pytest.raises(ConfigError, match="not names"):
        FileRegistry(root, namespace)


async def test_the_clocks_of_hosts_may_differ(root: Path, open_file: Open) -> None:
    """A worker whose clock is years behind or ahead stays as long as its file changes."""
    async with open_file() as registry, Views(registry) as views:
        folder = workers_folder(root)
        await eventually(folder.is_dir)
        for name in ("behind", "ahead"):
            (folder / f"{name}@1.aa.json").write_bytes(worker(name).to_json())
        ends = time.monotonic() + 2 * TTL_SECONDS
        seconds = 0
        while time.monotonic() < ends:
            seconds += 1
            os.utime(folder / "behind@1.aa.json", (seconds, seconds))
            os.utime(folder / "ahead@1.aa.json", (4e9 + seconds, 4e9 + seconds))
            await asyncio.sleep(0.2)
        assert views.all[-1] == (worker("ahead"), worker("behind"))
        await views.until_ids()


def test_a_file_is_alive_for_a_lease_after_its_last_change() -> None:
    clock = ManualClock()
    lifetimes = Lifetimes(10, clock)
    lifetimes.update({"a": (1, 1, 1), "b": (2, 1, 1)})
    clock.advance(9)
    lifetimes.update({"a": (1, 2, 1), "b": (2, 1, 1)})
    assert lifetimes.alive() == ["a", "b"]
    clock.advance(2)
    assert (lifetimes.alive(), lifetimes.expired(), lifetimes.abandoned()) == (["a"], {"b": (2, 1, 1)}, {})
    clock.advance(90)
    assert (lifetimes.alive(), lifetimes.abandoned()) == ([], {"b": (2, 1, 1)})
    lifetimes.extend(5)
    assert lifetimes.alive() == ["a", "b"]
    clock.advance(6)
    assert lifetimes.alive() == []


@pytest.mark.parametrize(("lease", "routers"), [(10.0, 4.0), (3.0, 3.0), (60.0, 60.0)])
def test_a_router_has_a_short_lease_unless_the_file_system_shows_changes_late(
    root: Path, lease: float, routers: float
) -> None:
    assert FileRegistry(root, NAMESPACE, lease).routers._ttl_seconds == routers
