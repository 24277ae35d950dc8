"""asyncio's structured concurrency, on every supported Python: `TaskGroup`, `timeout` and `Timeout` as in 3.11."""

import sys

if sys.version_info >= (3, 11):
    from asyncio import TaskGroup, Timeout, timeout
else:
    from taskgroup import TaskGroup, Timeout, timeout

__all__ = ["TaskGroup", "Timeout", "timeout"]
