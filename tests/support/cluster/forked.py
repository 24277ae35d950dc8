"""Routers and workers that are forked from a process which has imported them: processes as any other, but their start
takes little.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from support.cluster.preloaded import Preloaded
from support.engines.device import DEVICE

# The main module, too: each process would import it again. Nothing of it starts threads, or imports torch.
_SERVERS = ("__main__", "router.__main__", "router.server", "services.__main__")
_light = Preloaded(*_SERVERS, "services.engines.simulated.engine")
# The engine imports what it loads a model with only then, which takes 2.5 s of a processor.
_MODELS = [
    f"transformers.models.{each}" for each in ("llama.modeling_llama", "llava.modeling_llava", "clip.modeling_clip")
]
_with_torch = Preloaded(
    *_SERVERS, "services.engines.pytorch.engine", "services.engines.pytorch.vision.encoder", *_MODELS
)
_PATH = os.environ.get("PYTHONPATH")  # as the process has it that is forked
_KEEPERS = ("support.cluster.forked_keeper", "support.faults.killed_workers")


def may_be_forked(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """True for routers, and for workers with the simulated engine or on torch on a processor.

    A keeper takes the place of its process, unless it is one whose workers are forked from it.
    """
    if module in _KEEPERS:
        return DEVICE == "cpu"
    has_engine = any("simulated" in each for each in arguments) or _needs_torch(arguments)
    is_known = module == "router" or (module == "services" and has_engine)
    keeps = any("keep_memory" in each for each in arguments)
    return is_known and not keeps and environment.get("PYTHONPATH") == _PATH


def _needs_torch(arguments: Sequence[str]) -> bool:
    return DEVICE == "cpu" and any("pytorch" in each for each in arguments)


def _is_program(module: str) -> bool:
    """True for modules with a `main`, and no packages: those that run an engine alone, and keepers."""
    return module.startswith("support.")


class ForkedProcess:
    """Runs `python -m MODULE ARGUMENTS`. The part of subprocess.Popen that a Node and a Process need."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        given = (module, tuple(arguments), dict(environment), log)
        context = _with_torch if _is_program(module) or _needs_torch(arguments) else _light
        self._process = context.Process(target=_run, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Sends a signal; none to a process that has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        """Waits for its end. Raises TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return self._process.exitcode


def _run(module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    import_module(module if _is_program(module) else f"{module}.__main__").main()
