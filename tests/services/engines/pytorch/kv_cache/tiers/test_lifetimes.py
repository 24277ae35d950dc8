"""The tiers' threads, memory and file end with their engine, however it ends."""

import fcntl
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from support.engines.embedded import Checkpoint
from support.engines.engine_calls import collect, greedy
from support.engines.tier_damage import BLOCK_BYTES, SLOT_BYTES

from baton.errors import ConfigError
from services.engines.prompt import Prompt
from services.engines.pytorch import core
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.kv_cache.tiers.disk import Buffers, DiskFile
from services.engines.pytorch.kv_cache.tiers.options import DiskOptions

REPOSITORY = Path(__file__).resolve().parents[6]


def on_disk(path: Path, **more: object) -> dict[str, object]:
    disk = {"path": path, "bytes": 300 * SLOT_BYTES, **more}
    return {"kv_cache_bytes": 20 * BLOCK_BYTES, "tiers": {"host_bytes": 14 * BLOCK_BYTES, "disk": disk}}


def open_files(path: Path) -> list[str]:
    """The descriptors of this process for files that were made for this path, and have no name."""
    links = [os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")]
    return [each for each in links if each.startswith(f"{path}.") and each.endswith(" (deleted)")]


def tier_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("baton-kv-")]


async def test_the_file_has_no_name_while_it_is_used_and_its_space_is_free_afterwards(
    llama: Checkpoint, tmp_path: Path
) -> None:
    path = tmp_path / "kv"
    path.write_bytes(b"what a worker of an earlier version has left")
    async with llama.engine(**on_disk(path)):
        assert os.listdir(tmp_path) == []
        assert len(open_files(path)) == 1
    assert open_files(path) == []
    assert tier_threads() == []


async def test_workers_with_one_path_have_a_file_each(llama: Checkpoint, tmp_path: Path) -> None:
    async with llama.engine(**on_disk(tmp_path / "kv")), llama.engine(**on_disk(tmp_path / "kv")):
        assert len(open_files(tmp_path / "kv")) == 2


async def test_a_file_that_another_process_has_locked_is_refused(llama: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "kv"
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another worker uses it"):
            async with llama.engine(**on_disk(path)):
                pass
    assert path.exists()


async def test_what_another_user_has_left_at_the_path_gets_nothing_and_empties_no_other_file(tmp_path: Path) -> None:
    others, precious = tmp_path / "others", tmp_path / "precious"
    others.touch(0o666)
    precious.write_bytes(b"precious")
    (tmp_path / "linked").symlink_to(precious)
    os.link(precious, tmp_path / "hard")
    with others.open("rb") as reader:
        for name in ("others", "linked", "hard"):
            disk = DiskFile(DiskOptions.model_validate({"path": tmp_path / name, "bytes": 1 << 20}), 4096)
            [buffer] = Buffers(4096, 1, torch.device("cpu")).buffers
            disk.write(0, buffer)
            disk.close()
        assert reader.read() == b""
    assert os.listdir(tmp_path) == ["precious"]
    assert precious.read_bytes() == b"precious"


async def test_a_write_queue_of_many_small_blocks_is_one_mapping(llama: Checkpoint, tmp_path: Path) -> None:
    """A process may have 65,530 mappings."""
    async with llama.engine(**on_disk(tmp_path / "kv", write_queue_bytes=70_000 * BLOCK_BYTES)) as engine:
        assert len((await collect(engine.decode(Prompt((1, 2, 3)), greedy(4)))).ids) == 4


@pytest.mark.parametrize("what", ["open_vocabulary", "ModelFacts"])
async def test_an_engine_that_fails_after_its_tiers_are_open_closes_them(
    llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise ConfigError("it is broken")

    monkeypatch.setattr(core, what, fail)
    with pytest.raises(ConfigError, match="it is broken"):
        async with llama.engine(**on_disk(tmp_path / "kv")):
            pass
    assert open_files(tmp_path / "kv") == []
    assert tier_threads() == []


async def test_tiers_whose_host_memory_cannot_be_had_leave_no_file_open(llama: Checkpoint, tmp_path: Path) -> None:
    options = on_disk(tmp_path / "kv")
    tiers = {**options["tiers"], "host_bytes": 1 << 62}  # type: ignore[dict-item]
    with pytest.raises((OSError, ValueError, OverflowError)):
        async with llama.engine(**{**options, "tiers": tiers}):
            pass
    assert open_files(tmp_path / "kv") == []
    assert tier_threads() == []


HANGING = """
    import asyncio, sys, threading
    from services.engines.prompt import Prompt, Sampling
    from services.engines.pytorch.config import PyTorchConfig
    from services.engines.pytorch.engine import PyTorchEngine
    from services.engines.pytorch.kv_cache.tiers import disk, moves

    hung = threading.Event()

    def hang(*arguments):
        hung.set()
        threading.Event().wait()

    async def run():
        async with PyTorchEngine(PyTorchConfig.model_validate_json(sys.argv[1])) as engine:
            moves._CLOSE_SECONDS = 0.2
            for start in range(8):
                async for _ in engine.decode(Prompt(tuple(range(1 + start, 201 + start))), Sampling(max_tokens=1)):
                    pass
            assert hung.wait(60)
            print("has hung", flush=True)

    disk.os.pwrite = hang
    asyncio.run(run())
    print("has ended", flush=True)
"""


def test_a_disk_that_hangs_is_logged_and_does_not_keep_the_process_from_ending(
    llama: Checkpoint, tmp_path: Path
) -> None:
    config: PyTorchConfig = llama.config(**on_disk(tmp_path / "kv"))
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(HANGING), config.model_dump_json()],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "has hung" in ended.stdout
    assert "has ended" in ended.stdout
    assert "kv tier threads hang" in ended.stdout
    assert "baton-kv-writes" in ended.stdout
