"""`python -m services.keeper CONFIG.yaml key=value...`: runs `python -m services` with the same arguments, and keeps.

`python -m services` becomes this by itself if its configuration has `keep_memory`. It exits with the worker's code.
"""

import os
import sys

from services.keeper.keeper import Keeper, say

_NEEDED = ("pidfd_open", "memfd_create")


def main() -> None:
    """Runs the worker until it ends for good."""
    if missing := [name for name in _NEEDED if not hasattr(os, name)]:
        say(f"keep_memory: needs Linux 5.3 or later, and a Python that was built for it: no os.{missing[0]}")
        raise SystemExit(2)
    raise SystemExit(Keeper([sys.executable, "-m", "services", *sys.argv[1:]]).run())


if __name__ == "__main__":
    main()
