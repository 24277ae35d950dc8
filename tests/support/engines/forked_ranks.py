"""Ranks of an engine that are forked from a process which has imported diffusers, for what ranks do together.

The product starts them by `spawn`: the tests of their start and their end keep that.
"""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from support.cluster.preloaded import Preloaded

# Diffusers imports pipelines, and their models, only as it loads them.
_PIPELINES = ("stable_diffusion.pipeline_stable_diffusion", "wan.pipeline_wan")
_context = Preloaded("services.engines.diffusers.engine", *(f"diffusers.pipelines.{each}" for each in _PIPELINES))


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Ranks that engines start meanwhile are forked."""
    known = multiprocessing.get_context

    def get_context(method: str | None = None) -> Any:
        return _context if method == "spawn" else known(method)

    with mock.patch.object(multiprocessing, "get_context", get_context):
        yield
