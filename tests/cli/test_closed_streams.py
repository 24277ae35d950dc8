"""Standard streams that are closed, full or no text, and files of options on a disk that is full."""

import asyncio
import resource
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest
from support.clients.baton_command import SmallCluster
from support.manifests import ROOT

from baton.errors import ConfigError
from cli.outputs import require_writable
from runtime.aio import timeout


async def in_shell(words: str, stdin: bytes = b"") -> tuple[int, str]:
    """A command with redirections: its exit code, and what it wrote to standard error."""
    shell = await asyncio.create_subprocess_shell(
        f"{sys.executable} -m cli {words}", cwd=ROOT, stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    async with timeout(60):
        _, err = await shell.communicate(stdin)
    assert shell.returncode is not None
    return shell.returncode, err.decode()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("chat --address {} <&-", 0, ""),
        ("generate - --address {} <&-", 2, "error: INVALID_REQUEST: prompt: is empty\n"),
        ("workers --address {} >&-", 0, ""),
        ("workers --address {} >&- 2>&-", 0, ""),
        ("workers --address {} > /dev/full", 1, "error: [Errno 28] No space left on device\n"),
        ("generate hello --address {} > /dev/full", 1, "error: [Errno 28] No space left on device\n"),
    ],
)
async def test_a_stream_that_is_closed_or_full_is_an_error_in_one_line(
    cluster: SmallCluster, words: str, code: int, said: str
) -> None:
    assert await in_shell(words.format(cluster.address)) == (code, said)


async def test_a_conversation_that_is_no_text_says_so(cluster: SmallCluster) -> None:
    code, err = await in_shell(f"chat --address {cluster.address} < {sys.executable}")
    assert code == 0
    assert "no space" not in err
    assert "UTF-8" in err or "cannot be read" in err


def test_a_file_on_a_full_disk_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("kept")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"--json: .*kept\.json' cannot be written: File too large"):
            require_writable({"--json": str(kept)})
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        with pytest.raises(ConfigError, match=r"--json: .*new\.json' cannot be written: File too large"):
            require_writable({"--json": str(tmp_path / "new.json")})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    require_writable({"--json": str(kept), "--plot": str(tmp_path / "plot")})
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("kept.json", "kept")]
