"""The processes that a deployment's files start: Baton's, and Envoys before them.

The effective configuration of a process, printed by the program itself, so that defaults exist only once.
"""

import asyncio
import json
import re
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from baton.errors import ConfigError
from runtime.aio import timeout

Module = Literal["router", "services"]

# The defaults of Kubernetes and Compose.
KUBERNETES_GRACE_SECONDS = 30.0
COMPOSE_GRACE_SECONDS = 10.0

_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[hms]))+")


@dataclass(frozen=True, slots=True)
class Start:
    """`python -m MODULE CONFIG key=value...`, and how long its parent waits before it kills it.

    `grace_seconds` is None if unknown. `leaving_seconds` of them, a preStop sleep, pass before SIGTERM.
    """

    name: str
    module: Module
    config: Path
    overrides: Sequence[str] = ()
    grace_seconds: float | None = None
    leaving_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class EnvoyFile:
    """An Envoy's configuration, as parsed YAML."""

    name: str
    value: Mapping[str, Any]


def read(paths: Sequence[Path], root: Path) -> Iterator[Start | EnvoyFile]:
    """Everything that the files, or the YAML files of folders, start. Paths of configurations are relative to `root`.

    Other documents are skipped. Raises ConfigError for a file that is missing or not YAML.
    """
    for path in paths:
        files = sorted(path.glob("*.y*ml")) if path.is_dir() else [path]
        for file in files:
            for document in _documents(file):
                yield from _starts(file, document, root)


def seconds(text: object) -> float:
    """The seconds of a duration such as 660s, 1m30s or 0.5s. Raises ConfigError."""
    if isinstance(text, str) and _DURATION.fullmatch(text):
        return sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+(?:\.\d+)?)(ms|[hms])", text))
    raise ConfigError(f"{text!r} is not a duration such as 660s or 1m30s")


def _documents(path: Path) -> list[Any]:
    try:
        return list(yaml.safe_load_all(path.read_text()))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {error}") from None


def _starts(path: Path, document: Any, root: Path) -> Iterator[Start | EnvoyFile]:
    match document:
        case {"static_resources": _}:
            yield EnvoyFile(str(path), document)
        case {"kind": "Deployment" | "StatefulSet" | "DaemonSet", "spec": {"template": {"spec": pod}}}:
            yield from _of_pod(f"{path} ({document['metadata']['name']})", pod, root)
        case {"services": services}:
            for name, service in services.items():
                words = service.get("command", ())
                grace = service.get("stop_grace_period")
                grace_seconds = seconds(grace) if grace else COMPOSE_GRACE_SECONDS
                yield from _of_command(f"{path} ({name})", words, root, grace_seconds, 0.0)
        case {"engine": _} | {"roles": _}:
            yield Start(str(path), "services", path.resolve())
        case {"registry": _}:
            yield Start(str(path), "router", path.resolve())


def _of_pod(name: str, pod: Mapping[str, Any], root: Path) -> Iterator[Start]:
    grace = float(pod.get("terminationGracePeriodSeconds", KUBERNETES_GRACE_SECONDS))
    for container in pod["containers"]:
        leaving = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        words = [*container.get("command", ()), *container.get("args", ())]
        yield from _of_command(name, words, root, grace, float(leaving))


def _of_command(name: str, words: object, root: Path, grace: float, leaving: float) -> Iterator[Start]:
    match words:
        case [str(python), "-m", ("router" | "services") as module, str(config), *overrides] if "python" in python:
            # Kubernetes fills in $(NAME) when it starts a pod; no timeout depends on it.
            filled = [re.sub(r"\$\(\w+\)", "127.0.0.1", str(each)) for each in overrides]
            yield Start(name, module, root / config, filled, grace, leaving)


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
