"""Commands of processes that end when the process that starts them does, also if that is killed."""

import os
import sys
from collections.abc import Sequence

# The process becomes the program itself, so that its id is the program's. SIGPIPE is not ignored there.
_BEGIN = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """The command of a program that is killed once the thread that starts it has ended; elsewhere than on Linux, as it
    is.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-ISc", _BEGIN, str(os.getpid()), *command]
