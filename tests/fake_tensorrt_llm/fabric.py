"""The way of KV from one process to another: by a file for each prompt, which the process that fetches it removes."""

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path


class FileFabric:
    """A folder. What a process held that is gone cannot be fetched: its memory went with it."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def publish(self, number: int, meaning: Sequence[int]) -> None:
        """Makes it possible to fetch, from this process."""
        temporary = self._folder / f"{number}.new"
        temporary.write_text(json.dumps({"owner": os.getpid(), "meaning": list(meaning)}))
        temporary.rename(self._folder / str(number))

    def take(self, number: int) -> tuple[int, ...] | None:
        """Fetches it, once; None if it is not there."""
        taken = self._folder / f"{number}.taken"
        try:
            (self._folder / str(number)).rename(taken)
        except FileNotFoundError:
            return None
        found = json.loads(taken.read_text())
        taken.unlink()
        return tuple(found["meaning"]) if _is_alive(found["owner"]) else None

    def has(self, number: int) -> bool:
        """True if it was not fetched yet."""
        return (self._folder / str(number)).exists()

    def withdraw(self, number: int) -> None:
        """Ends the time in which it can be fetched."""
        with contextlib.suppress(FileNotFoundError):
            (self._folder / str(number)).unlink()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
