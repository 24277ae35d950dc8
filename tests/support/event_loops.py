"""Processes with and without uvloop."""

import os
from pathlib import Path

import pytest

LOOPS = ("uvloop", "asyncio")


def choose_loop(loop: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has processes that are started from now on find no uvloop, if `loop` is asyncio."""
    if loop == "uvloop":
        return
    (folder / "uvloop.py").write_text("raise ImportError('not installed')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
