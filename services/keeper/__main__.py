"""`python -m services.keeper CONFIG.yaml key=value...`: runs `python -m services` with the same arguments, and keeps.

`python -m services` becomes this by itself if its configuration has `keep_memory`. It exits with the worker's code.
"""

import os
import sys

from services.keeper.keeper import Keeper, say


def main() -> None:
    """Runs the worker until it ends for good."""
    if not hasattr(os, "pidfd_open"):
        say("keep_memory: needs Linux 5.3 or later")
        raise SystemExit(2)
    raise SystemExit(Keeper([sys.executable, "-m", "services", *sys.argv[1:]]).run())


if __name__ == "__main__":
    main()
