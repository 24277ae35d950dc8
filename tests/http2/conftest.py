"""Runs what calls see in both event loops: processes run in uvloop, whose transports are not asyncio's."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

_LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loops that a test is run in."""
    if item.path.name in ("test_client_calls.py", "test_interop.py", "test_streams.py"):
        return _LOOPS
    return {"asyncio": asyncio.new_event_loop}
