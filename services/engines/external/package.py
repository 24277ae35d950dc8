"""Imports a package that brings an engine, checks its version, and starts and ends its engine.

The facts of a checkpoint in Hugging Face format that engines of other packages share.
"""

import asyncio
import importlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import structlog
from packaging.version import InvalidVersion, Version

from baton.errors import ConfigError, EngineFailed
from runtime.threads import daemon_call
from services.engines.kv import KvLayout
from services.engines.pytorch.model.checkpoint import read_json

log = structlog.get_logger(__name__)

_SHUTDOWN_SECONDS = 20.0
# Of one number in a KV cache; others have two. nvfp4 has one byte of scale for every 16 numbers.
_NUMBER_BYTES = {"float32": 4.0, "fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "nvfp4": 9 / 16}


@dataclass(frozen=True, slots=True)
class PackageSource:
    """A package: the engine's kind, the name for people and the module's, how to get it, and the versions that do."""

    kind: str
    title: str
    module: str
    how: str
    oldest: Version
    end: Version
    supported: str

    def load(self, name: str = "") -> ModuleType:
        """Imports the package, or a module of it. Raises a one-line ConfigError if that cannot be done here."""
        try:
            return importlib.import_module(f"{self.module}.{name}" if name else self.module)
        except (ImportError, OSError, RuntimeError) as error:
            needed = f"engine.kind {self.kind} needs {self.title}, which cannot be imported ({one_line(error)})"
            raise ConfigError(f"{needed}: {self.how}") from error

    def version_of(self, package: ModuleType) -> Version:
        """The package's version. Raises ConfigError if it is none of the supported ones."""
        try:
            version = Version(str(package.__version__))
        except (AttributeError, InvalidVersion) as error:
            raise ConfigError(f"{self.module} does not say its version: {self.how}") from error
        if not self.oldest <= version < self.end:
            raise ConfigError(f"{self.module} {version} is not supported; {self.supported} are")
        return version


@contextmanager
def loading(title: str, model: Path) -> Iterator[None]:
    """Turns the package's exceptions at a start into ours: refused arguments, and a model that cannot be loaded."""
    try:
        yield
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"{title} does not accept the arguments: {one_line(error)}") from error
    except (RuntimeError, OSError) as error:
        raise EngineFailed(f"{title} cannot load {model}: {one_line(error)}") from error


async def shut_down(engine: Any, name: str) -> None:
    """Shuts a package's engine down, with its processes. One that hangs is left behind."""
    ending = daemon_call(engine.shutdown, f"{name}-shutdown")
    _, late = await asyncio.wait([ending], timeout=_SHUTDOWN_SECONDS)
    if late:
        log.error(f"{name} does not shut down", seconds=_SHUTDOWN_SECONDS)
    else:
        ending.result()


def one_line(error: Exception) -> str:
    """The text of an error without its line breaks, or the name of its class."""
    return " ".join(str(error).split()) or type(error).__name__


def read_model(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration, and that of its language model. Raises ConfigError for a folder that is no checkpoint."""
    whole = read_json(folder / "config.json")
    return whole, {**whole, **whole.get("text_config", {})}


def kv_dtype(kv_cache_dtype: str, dtype: str, model: Mapping[str, Any]) -> str:
    """The type of an engine's KV: that of its cache, or of its computing, or of its checkpoint, unless `auto`."""
    for given in (kv_cache_dtype, dtype):
        if given != "auto":
            return given
    return str(model.get("dtype") or model.get("torch_dtype") or "bfloat16")


def kv_layout(identity: Mapping[str, object], model: Mapping[str, Any], dtype: str, block_tokens: int) -> KvLayout:
    """The layout of KV inside an engine. Its digest covers the identity, which both sides of a handoff must share."""
    heads = int(model["num_attention_heads"])
    kv_heads = int(model.get("num_key_value_heads") or heads)
    head_dim = int(model.get("head_dim") or int(model["hidden_size"]) // heads)
    layers = int(model["num_hidden_layers"])
    return KvLayout(
        model=json.dumps(identity, sort_keys=True),
        dtype=dtype,
        num_layers=layers,
        kv_factor=2,
        kv_heads=kv_heads,
        block_tokens=block_tokens,
        head_dim=head_dim,
        block_bytes=int(layers * 2 * kv_heads * block_tokens * head_dim * _NUMBER_BYTES.get(dtype, 2.0)),
    )
