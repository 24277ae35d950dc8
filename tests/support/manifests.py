"""Reads the files of deploy/: their documents, and the processes that they start."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from router.config import RouterConfig
from runtime.config import load
from services.config import WorkerConfig

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"

MODULES: Mapping[str, type[RouterConfig] | type[WorkerConfig]] = {"router": RouterConfig, "services": WorkerConfig}


@dataclass(frozen=True, slots=True)
class Command:
    """`python -m MODULE CONFIG key=value...`, as a container starts it."""

    where: str
    module: str
    config: str
    overrides: Sequence[str]

    def load(self) -> RouterConfig | WorkerConfig:
        """The configuration that the process would have. Raises ConfigError."""
        return load(MODULES[self.module], ROOT / self.config, self.overrides).value


def command_of(where: str, words: Sequence[str], variables: Mapping[str, str] | None = None) -> Command:
    """Reads the words; `$(NAME)` is replaced as Kubernetes does it."""
    python, flag, module, config, *overrides = words
    assert python.startswith("python"), f"{where}: {words}"
    assert flag == "-m", f"{where}: {words}"
    known = variables or {}
    return Command(where, module, config, [re.sub(r"\$\((\w+)\)", lambda m: known[m[1]], each) for each in overrides])


def documents(folder: Path) -> Iterator[tuple[Path, Any]]:
    """Every document of every YAML file of a folder."""
    for path in sorted(folder.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            yield path, document
