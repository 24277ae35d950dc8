"""Threads that are not of a pool. Those of pools are started by the event loop, `run_in_executor` and `to_thread`."""

import threading
from collections.abc import Callable
from typing import Any


def start_thread(call: Callable[..., Any], *arguments: Any, name: str) -> threading.Thread:
    """Runs a call in a thread of its own, which does not delay the end of the process."""
    thread = threading.Thread(target=call, args=arguments, name=name, daemon=True)
    thread.start()
    return thread
