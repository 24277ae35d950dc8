"""What a process would run with: the program itself is asked, so that its defaults are known in one place only."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from client.doctor.deployment import Start
from rpc.aio import timeout
from rpc.errors import ConfigError

_SECONDS = 60.0
_TRANSFER_TIMEOUT = ("cache_transceiver_config", "kv_transfer_timeout_ms")


@dataclass(frozen=True, slots=True)
class Process:
    """A process that is not running: how it would be started, in which folder, and every value that it would have."""

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
        """A value in seconds, by the path of its key."""
        return float(self.values[key])

    @property
    def kv_transfer_seconds(self) -> float | None:
        """After which TensorRT-LLM gives KV up that nobody fetched; None for other engines, or if it is not said."""
        section, key = _TRANSFER_TIMEOUT
        value = self.values.get(f"engine.args.{section}.{key}")
        path = self.values.get("engine.extra_engine_args")
        if path:
            arguments = yaml.safe_load((self.folder / path).read_text())
            value = (arguments.get(section) or {}).get(key, value)
        return None if value is None else float(value) / 1000


async def ask(start: Start, folder: Path) -> Process:
    """Has the program print its configuration, in the folder where it would run.

    Raises ConfigError with what the program says of a configuration that is wrong.
    """
    command = (sys.executable, "-m", start.module, str(start.config), *start.overrides, "--print-config")
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
    return Process(start, folder, dict(_value(line) for line in out.decode().splitlines() if " = " in line))


def _value(line: str) -> tuple[str, Any]:
    key, _, rest = line.partition(" = ")
    return key, json.loads(rest.rpartition("  # ")[0])
