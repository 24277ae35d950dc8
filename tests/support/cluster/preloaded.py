"""Processes that are forked from one which has imported what they need: torch alone takes seconds of a processor.

As with `spawn`, a process has nothing of the one that starts it, and no thread ran in the one that it is forked from.
"""

from multiprocessing import forkserver, popen_forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock


def preloaded(*modules: str) -> ForkServerContext:
    """A context of multiprocessing with a server of its own, which begins with the first process."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload(list(modules))

    class Popen(popen_forkserver.Popen):
        def _launch(self, process_obj: BaseProcess) -> None:
            with mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
                super()._launch(process_obj)  # type: ignore[misc]

    class Process(ForkServerProcess):
        @staticmethod
        def _Popen(process_obj: BaseProcess) -> Any:
            return Popen(process_obj)

    class Context(ForkServerContext):
        pass

    Context.Process = Process  # type: ignore[assignment]
    return Context()
