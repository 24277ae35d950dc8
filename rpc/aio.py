"""asyncio's structured concurrency, on every supported Python: `TaskGroup` and `timeout` as in 3.11."""

import sys

if sys.version_info >= (3, 11):
    from asyncio import TaskGroup, timeout
else:
    from taskgroup import TaskGroup, timeout

__all__ = ["TaskGroup", "timeout"]
