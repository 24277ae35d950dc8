"""Ranks of an engine that are forked from a process which has imported diffusers: each import takes seconds.

As with `spawn`, which the product uses, a rank has nothing of the process that starts it. The tests that need no start
of their own take these; the others keep `spawn`.
"""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

# Not the server of support/cluster/forked.py: what that one forks needs no torch.
_server = forkserver.ForkServer()
_server.set_forkserver_preload(["services.engines.diffusers.engine"])


class _Popen(popen_forkserver.Popen):
    def _launch(self, process_obj: BaseProcess) -> None:
        with mock.patch.object(forkserver, "connect_to_new_process", _server.connect_to_new_process):
            super()._launch(process_obj)  # type: ignore[misc]


class _Process(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:
        return _Popen(process_obj)


class _Context(ForkServerContext):
    Process = _Process  # type: ignore[assignment]


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Ranks that engines start meanwhile are forked."""
    known = multiprocessing.get_context

    def get_context(method: str | None = None) -> Any:
        return _Context() if method == "spawn" else known(method)

    with mock.patch.object(multiprocessing, "get_context", get_context):
        yield
