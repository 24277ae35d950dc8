"""Fixed hashes: sets of strings have an order then, in every process."""

import os
import sys

_VARIABLE = "PYTHONHASHSEED"


def fix_hashes(module: str) -> None:
    """Starts this program, which is `module`, again unless its hashes are fixed."""
    if os.environ.get(_VARIABLE) != "0":
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], {**os.environ, _VARIABLE: "0"})
