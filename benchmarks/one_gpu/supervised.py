"""A worker without a keeper, behind a supervisor that starts it again whenever it was killed, like an init system."""

import signal
import subprocess
import sys
from types import FrameType

_KINDS = {True: "services", False: "benchmarks.one_gpu.worker"}


def main() -> None:
    """Runs the worker of the arguments again and again, until this process is told to end."""
    module = _KINDS[any('"kind": "vllm"' in each for each in sys.argv)]
    while True:
        worker = subprocess.Popen([sys.executable, "-m", module, *sys.argv[1:]])

        def end(_number: int, _frame: FrameType | None, worker: "subprocess.Popen[bytes]" = worker) -> None:
            worker.terminate()
            raise SystemExit(worker.wait())

        signal.signal(signal.SIGTERM, end)
        if worker.wait() >= 0:
            raise SystemExit(worker.returncode)


if __name__ == "__main__":
    main()
