"""The processes that a deployment's files start: Baton's, and Envoys before them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from baton.errors import ConfigError

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
