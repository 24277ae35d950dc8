"""Kept memory has one owner, the KV of its tokens, and no holder that has no use for it; a restart finds it."""

import os
from typing import Any

from services.resume.streams import KeptStreams
from services.resume.takeover import LeftStream
from simulation.entropy import Time
from simulation.invariants.base import Invariant
from simulation.reference import reference, text_of_ids

_EVERY_SECONDS = 0.5


class KeptKvIsOfItsTokens(Invariant):
    """The prefix cache that a process has taken over, and what it has at any time, is what its names say: nothing of
    another owner, of another epoch, or half-written.
    """

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self._look_at = 0.0

    def taken_over(self, process: Any, engine: Any) -> None:
        self._check(process, engine)

    def look(self) -> None:
        if self.world.keepers is None or Time.now < self._look_at:
            return
        self._look_at = Time.now + _EVERY_SECONDS
        for process in self.world.keepers.living:
            if process.engine is not None and not process.engine.is_closed:
                self._check(process, process.engine)

    def _check(self, process: Any, engine: Any) -> None:
        for rank in engine._ranks.all:
            for name, block in rank.blocks._by_hash.items():
                if engine.memory.block(block) != rank.contents._bytes(name):
                    self.problem(
                        f"{process.node.name}, process {process.pid}: block {block} is not what it is cached for"
                    )
                    return


class KeptMemoryHasOneOwner(Invariant):
    """A process gets KV only once the one before it is dead: it may be written to until then."""

    def taken_over(self, process: Any, engine: Any) -> None:
        for other in self.world.keepers.living:
            if (
                other is not process
                and other.engine is not None
                and not other.engine.is_closed
                and _file(other) == _file(process)
            ):
                self.problem(f"{process.node.name}: process {process.pid} has the memory that {other.pid} has")


class KeptMemoryHasItsForm(Invariant):
    """A process takes memory over only if it was made for what the process needs: by its configuration of now."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self._forms: dict[int, str] = {}  # of each pool's file

    def memory_got(self, process: Any, form: str, found: Any) -> None:
        file = os.fstat(found.pool).st_ino
        if not found.is_found:
            self._forms[file] = form
        elif self._forms[file] != form:
            self.problem(f"{process.node.name}: process {process.pid} needs {form}, and has got {self._forms[file]}")


class LeftAnswersAreWhole(Invariant):
    """A kept answer that the next process goes on with has ids of its own, from the first one on."""

    def install(self) -> None:
        take_over = KeptStreams.take_over

        def taking_over(streams: KeptStreams, left: LeftStream, own: Any) -> None:
            self._check(left.request)
            take_over(streams, left, own)

        KeptStreams.take_over = taking_over  # type: ignore[method-assign]

    def _check(self, request: Any) -> None:
        steps = self.world.steps
        client = self.world.running.get(steps.request_of(request.request_id))
        if client is None or request.request_id in steps.first:
            return  # another one of several answers, whose number is not known
        expected = reference(client.result.asked)[: len(request.emitted)]
        if list(request.emitted) != expected:
            found = f"{text_of_ids(list(request.emitted))!r} instead of {text_of_ids(expected)!r}"
            self.problem(f"{client.result.name}: goes on after {found} in the next process")


class RestartsFindTheirKv(Invariant):
    """A process finds the memory of the one before it, unless its keeper had to free it; the first one of a keeper
    finds none, and serves all the same.
    """

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self._known: dict[Any, tuple[int, int]] = {}  # by keeper: the file, and how much it had freed by then

    def taken_over(self, process: Any, engine: Any) -> None:
        keeper = process.keeper
        file, freed = self._known.get(keeper, (0, 0))
        self._known[keeper] = _file(process), keeper.freed
        found = engine.kept.is_found
        if found and file != _file(process):
            self.problem(f"{keeper.name}: process {process.pid} has found memory that no process has left")
        if file and not found and freed == keeper.freed:
            self.problem(f"{keeper.name}: process {process.pid} has not found the memory that its keeper holds")


class KeptMemoryIsFreed(Invariant):
    """In quiet each kept file is held by its keeper once, and by who has it mapped; a keeper talks to processes that
    live; and nothing else is open.
    """

    def end(self) -> None:
        keepers = self.world.keepers
        if keepers is None:
            return
        held: dict[int, int] = {}
        for keeper in keepers.running.values():
            open_ends = sum(end.fileno() >= 0 for end in keeper.ends)
            if open_ends > len(keeper.living):
                self.problem(
                    f"{keeper.name}: its keeper has {open_ends} conversations with {len(keeper.living)} processes"
                )
            for each in keeper.kept_descriptors:
                inode = os.fstat(each).st_ino
                held[inode] = held.get(inode, 0) + 1
        for process, files in keepers.mappings:
            # A process has its pool's file open, and each of its mappings has; readers may have that of a dead one.
            for inode in files[:1] if process.code is not None else (*files, files[0]):
                held[inode] = held.get(inode, 0) + 1
        for inode, count in sorted(_open_files(keepers.files).items()):
            if count > held.get(inode, 0):
                self.problem(f"{count} descriptors of kept memory are open, of which {held.get(inode, 0)} are of use")
                return


def _file(process: Any) -> int:
    """The pool's file."""
    return os.fstat(process.engine.memory.file_descriptor).st_ino


def _open_files(inodes: Any) -> dict[int, int]:
    """The number of descriptors of each of these files that this process has open."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            inode = os.fstat(int(name)).st_ino
        except OSError:
            continue  # that of the folder itself
        if inode in inodes:
            found[inode] = found.get(inode, 0) + 1
    return found
