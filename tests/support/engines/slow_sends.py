"""SGLang's scheduler with a link that is slow while a file is there: a part of a prompt's KV is written late.

The file's name is in the environment, since a scheduler is a process of its own.
"""

import importlib
import os
import time
from pathlib import Path
from typing import Any

from services.engines.sglang.inside import processes

FILE = "BATON_TEST_SLOW_SENDS"
SLOW_SECONDS = 0.6


def run_alone(*arguments: Any, **named: Any) -> None:
    """SGLang's own scheduler."""
    _slow()
    importlib.import_module("sglang.srt.managers.scheduler").run_scheduler_process(*arguments, **named)


def run_behind_baton(*arguments: Any, **named: Any) -> None:
    """The scheduler with the adapter's changes."""
    _slow()
    processes.run_scheduler(*arguments, **named)


def _slow() -> None:
    manager = importlib.import_module("sglang.srt.disaggregation.nixl.conn").NixlKVManager
    send, file = manager.send_kvcache, Path(os.environ[FILE])

    def send_late(self: Any, *arguments: Any, **named: Any) -> Any:
        if file.exists():
            time.sleep(SLOW_SECONDS)
        return send(self, *arguments, **named)

    manager.send_kvcache = send_late
