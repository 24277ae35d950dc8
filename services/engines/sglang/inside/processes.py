"""The start of SGLang's processes. One that fails ends at once, and alone: the worker sees that it has ended.

SGLang's own way is SIGQUIT to its parent, which ends by it, and the process itself may stay for minutes.
"""

import importlib
import os
import signal
from typing import Any

from services.engines.sglang.inside import draws, kv_events, scheduler

_FAILED = 70


def run_scheduler(*arguments: Any, **named: Any) -> None:
    """Runs SGLang's scheduler, with the changes of scheduler.py, draws.py and kv_events.py."""
    _fail_alone()
    scheduler.change()
    draws.change()
    kv_events.change()
    importlib.import_module("sglang.srt.managers.scheduler").run_scheduler_process(*arguments, **named)


def run_detokenizer(*arguments: Any, **named: Any) -> None:
    """Runs SGLang's detokenizer."""
    _fail_alone()
    detokenizer = importlib.import_module("sglang.srt.managers.detokenizer_manager")
    detokenizer.run_detokenizer_process(*arguments, **named)


def _fail_alone() -> None:
    processes: Any = importlib.import_module("psutil").Process
    send = processes.send_signal

    def end_or_send(process: Any, number: int) -> None:
        if number == signal.SIGQUIT:
            os._exit(_FAILED)
        send(process, number)

    processes.send_signal = end_or_send
