"""The `baton` command, forked from a process that has imported it: its imports take half a second of a processor."""

import asyncio
import os
import pkgutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from support.clients.baton_command import Outcome
from support.cluster.preloaded import Preloaded

import cli

# The main module, too: each process would import it again.
_command = Preloaded("__main__", *(each.name for each in pkgutil.walk_packages(cli.__path__, "cli.")))
_PATH = os.environ.get("PYTHONPATH")  # as the process has it that is forked
_STREAMS = ("stdin", "stdout", "stderr")


def may_be_forked(environment: Mapping[str, str]) -> bool:
    """False if the command is to import other packages."""
    return environment.get("PYTHONPATH") == _PATH


def begin_to_import() -> None:
    """Has the process import the command, if it does not already, and does not wait for it."""
    _command.begin()


async def run_forked(
    words: Sequence[str | bytes], folder: Path, environment: Mapping[str, str], stdin: bytes
) -> Outcome:
    """Runs `python -m cli WORDS` in the folder."""
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name, each) for each in _STREAMS]
        files[0].write_bytes(stdin)
        for each in files[1:]:
            each.touch()
        process = _command.Process(
            target=_run, args=([os.fsdecode(each) for each in words], folder, environment, files)
        )
        await asyncio.to_thread(process.start)
        await asyncio.to_thread(process.join)
        assert process.exitcode is not None
        return Outcome(process.exitcode, *(each.read_bytes().decode() for each in files[1:]))


def _run(words: Sequence[str], folder: Path, environment: Mapping[str, str], files: Sequence[Path]) -> None:
    for number, file in enumerate(files):
        os.dup2(os.open(file, os.O_APPEND | (os.O_WRONLY if number else os.O_RDONLY)), number)
    sys.stdin = open(0)  # noqa: SIM115  # multiprocessing has put the null device there
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["cli", *words]
    import_module("cli.__main__").main()
