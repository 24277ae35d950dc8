"""Processes that are forked from one which has imported what they need: torch alone takes seconds of a processor.

As with `spawn`, a process has nothing of the one that starts it, and no thread ran in the one that it is forked from.
"""

import threading
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

_servers: dict[tuple[str, ...], forkserver.ForkServer] = {}
_launching = threading.Lock()


class _Process(ForkServerProcess):
    modules: tuple[str, ...] = ()

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:
        return _Popen(process_obj)


class _Popen(popen_forkserver.Popen):
    def _launch(self, process_obj: BaseProcess) -> None:
        assert isinstance(process_obj, _Process)
        server = _servers[process_obj.modules]
        with _launching, mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
            super()._launch(process_obj)  # type: ignore[misc]


class Preloaded(ForkServerContext):
    """A context of multiprocessing with a server of its own, which begins with the first process."""

    def __init__(self, *modules: str) -> None:
        super().__init__()
        self._modules = modules
        _servers[modules] = forkserver.ForkServer()
        _servers[modules].set_forkserver_preload(list(modules))

    def begin(self) -> None:
        """Starts the server, unless it runs, and does not wait for its imports."""
        _servers[self._modules].ensure_running()

    def Process(self, *args: Any, **options: Any) -> BaseProcess:  # type: ignore[override]
        process = _Process(*args, **options)
        process.modules = self._modules
        return process
