"""The memory that a process may still take: the machine's, and a container's."""

from pathlib import Path

from runtime.machine import available_bytes


def _files(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def test_cached_files_count_as_available(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 4000 kB\nMemFree: 10 kB\nMemAvailable: 3000 kB\n")
    assert available_bytes(meminfo, tmp_path) == 3000 * 1024


def test_a_limit_of_the_container_is_kept(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 3000 kB\n")
    assert available_bytes(meminfo, _files(tmp_path, memory_max="5000\n", memory_current="2000\n")) == 3000
    assert available_bytes(meminfo, _files(tmp_path, memory_max="5000\n", memory_current="9000\n")) == 0
    assert available_bytes(meminfo, _files(tmp_path, memory_max="max\n")) == 3000 * 1024


def test_a_machine_that_does_not_say_has_its_free_pages(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "none", tmp_path) > 0
