"""The effective configuration of a process, printed by the program itself, so that defaults exist only once."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from baton.errors import ConfigError
from devtools.doctor.deployment import Start
from runtime.aio import timeout

_SECONDS = 60.0

# Like `python -m`, but without the current folder on the path: the user may have a folder named services or router.
_RUN_INSTALLED_MODULE = """
import runpy, sys
sys.path[:] = [place for place in sys.path if place]
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
_TRANSFER_TIMEOUT = ("cache_transceiver_config", "kv_transfer_timeout_ms")


@dataclass(frozen=True, slots=True)
class ConfiguredProcess:
    """A process that need not run: its command, its folder, and its effective configuration."""

    start: Start
    folder: Path
    values: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.start.name

    @property
    def is_router(self) -> bool:
        return self.start.module == "router"

    def seconds(self, key: str) -> float:
        """A value in seconds by the path of its key."""
        return float(self.values[key])

    @property
    def kv_transfer_seconds(self) -> float | None:
        """The time after which TensorRT-LLM frees KV that was not fetched; None if unset, and for other engines."""
        section, key = _TRANSFER_TIMEOUT
        value = self.values.get(f"engine.args.{section}.{key}")
        path = self.values.get("engine.extra_engine_args")
        if path:
            arguments = yaml.safe_load((self.folder / path).read_text())
            value = (arguments.get(section) or {}).get(key, value)
        return None if value is None else float(value) / 1000


async def ask(start: Start, folder: Path) -> ConfiguredProcess:
    """Runs the program with --print-config in the folder where it would run.

    Raises ConfigError with the program's message if its configuration is wrong.
    """
    arguments = (start.module, str(start.config), *start.overrides, "--print-config")
    command = (sys.executable, "-c", _RUN_INSTALLED_MODULE, *arguments)
    process = await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=PIPE, stderr=PIPE)
    try:
        async with timeout(_SECONDS):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise ConfigError(f"{start.name}: {err.decode().strip()}")
    return ConfiguredProcess(start, folder, dict(_value(line) for line in out.decode().splitlines() if " = " in line))


def _value(line: str) -> tuple[str, Any]:
    key, _, rest = line.partition(" = ")
    return key, json.loads(rest.rpartition("  # ")[0])
