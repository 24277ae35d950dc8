"""The folder of workers that share memory: real files and locks, which the kernel frees when a process is killed."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from services.sleeping.group import Membership
from simulation.loop import NODE, Node


class MemoryGroup:
    """A folder of this run, for those of `hosts` that share memory. `close` removes it."""

    def __init__(self, hosts: Mapping[str, Any]) -> None:
        self._hosts = hosts
        self.folder = Path(mkdtemp(prefix="baton-simulation-"))
        self._open: dict[Membership, Node | None] = {}

    def install(self) -> None:
        """Begins to note which process has which file open."""
        begin, end, files = Membership.__init__, Membership.__exit__, self._open

        def beginning(membership: Membership, *arguments: Any) -> None:
            begin(membership, *arguments)
            files[membership] = NODE.get()

        def ending(membership: Membership, *error: object) -> None:
            if files.pop(membership, None) is not None:
                end(membership, *error)

        Membership.__init__, Membership.__exit__ = beginning, ending  # type: ignore[method-assign]

    @property
    def names(self) -> list[str]:
        """The workers that have joined it, and have begun to serve."""
        return [node.name for node in self._open.values() if node is not None and node.name in self._hosts]

    def kill(self, node: Node) -> None:
        """Closes what a process has open."""
        for membership in [one for one, owner in self._open.items() if owner is node]:
            membership.__exit__()

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
