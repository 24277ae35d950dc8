"""A keeper whose workers are forked from it, as it is from a process that has imported what they need.

By itself a keeper starts `python -m services`, whose imports take 5 to 10 s of a processor: `services.keeper.child`.
"""

import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from services import __main__ as services
from services.keeper.fork_server import die_with
from services.keeper.keeper import Keeper
from services.keeper.messages import VARIABLE


class ForkedKeeper(Keeper):
    """Runs the worker with these arguments."""

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__([sys.executable, "-m", "services", *arguments])
        self._arguments = arguments
        self._inherited = _descriptors()

    def _start_anew(self, end: socket.socket) -> int:
        keeper = os.getpid()
        pid = os.fork()
        if not pid:
            self._become_the_worker(keeper, end)
        return pid

    def _become_the_worker(self, keeper: int, end: socket.socket) -> NoReturn:
        """Leaves the objects of the keeper alone until the process ends: their descriptors are another's by then."""
        gc.freeze()
        os.setsid()
        die_with(keeper)
        for descriptor in _descriptors() - self._inherited - {end.fileno()}:
            os.close(descriptor)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.environ[VARIABLE] = str(end.fileno())
        sys.argv = ["services", *self._arguments]
        _run()


def _descriptors() -> set[int]:
    """Those that are open."""
    listed = {int(each) for each in os.listdir("/proc/self/fd")}
    return {each for each in listed if os.path.exists(f"/proc/self/fd/{each}")}


def _run() -> NoReturn:
    code = 1
    try:
        services.main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Exits with the worker's code."""
    raise SystemExit(ForkedKeeper(sys.argv[1:]).run())
