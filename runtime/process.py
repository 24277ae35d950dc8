"""Running a process: its event loop, its signals, its exit code."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import structlog

from baton.errors import ConfigError, EngineFailed
from baton_http2.sockets.descriptors import raise_limit
from runtime.aio import leaf_errors
from runtime.garbage import collect_rarely, collected_as_memory_grows, exempt_living_objects
from runtime.telemetry.metrics import watched_event_loop

try:
    from uvloop import run as run_in_loop
except ImportError:
    from asyncio import run as run_in_loop  # type: ignore[assignment]

log = structlog.get_logger(__name__)

Main = Callable[[asyncio.Event], Coroutine[Any, Any, None]]


def run(main: Main) -> None:
    """Runs `main(stopping)` to its end, in uvloop where it is installed.

    The first SIGTERM or SIGINT sets `stopping`, after which main should end by itself; the second cancels it. A
    ConfigError is one line on stderr and exit code 2, any other error is logged and exit code 1, a cancelled main is
    128 + the signal's number. Returns only if main ended well. After an EngineFailed the process ends at once, without
    destructors and handlers of its exit: those of a failed device's memory abort or hang.
    """
    raise_limit()
    exempt_living_objects()
    collect_rarely()
    exit_code = run_in_loop(_supervise(main))
    if exit_code:
        raise SystemExit(exit_code)


async def _supervise(main: Main) -> int:
    stopping = asyncio.Event()
    signals: list[signal.Signals] = []
    task = asyncio.ensure_future(main(stopping))

    def on_signal(number: signal.Signals) -> None:
        # Not if `stopping` was set for another reason: one signal is never the second.
        if signals:
            task.cancel()
        signals.append(number)
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        async with watched_event_loop(), collected_as_memory_grows():
            await task
    except asyncio.CancelledError:
        return 128 + signals[-1] if signals else 1
    except Exception as error:  # the end of a process, as the interceptor `errors` is that of a call
        exit_code = _report(error)
        if any(isinstance(cause, EngineFailed) for cause in leaf_errors(error)):
            # Here, where the error's traceback still keeps all tensors alive.
            _exit_without_destructors(exit_code)
        return exit_code
    return 0


def _report(error: Exception) -> int:
    found = [cause for cause in leaf_errors(error) if isinstance(cause, ConfigError)]
    if found:
        print(found[0].message, file=sys.stderr)
        return 2
    log.error("process failed", exc_info=error)
    return 1


def _exit_without_destructors(exit_code: int) -> NoReturn:
    try:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # also if the log's reader has gone
        os._exit(exit_code)
