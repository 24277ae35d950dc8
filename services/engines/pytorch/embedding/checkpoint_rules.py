"""The rules for vectors in a checkpoint's sentence-transformers files: `modules.json`, and those that it names."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import ConfigError

# The keys of a Pooling module's configuration, each true or false, in the order in which vectors are joined.
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
# Newer files have one key, `pooling_mode`, with these values.
_NAMES = {"weightedmean": "weighted_mean", "mean_sqrt_len_tokens": "mean_sqrt_len", "lasttoken": "last"}


@dataclass(frozen=True, slots=True)
class VectorRules:
    """`pooling` is empty, and the others None, where the files say nothing."""

    pooling: tuple[str, ...] = ()
    normalize: bool | None = None
    max_input_tokens: int | None = None


def read_rules(folder: Path) -> VectorRules:
    """Reads the files. Raises ConfigError for those that cannot be read, and for modules that are not supported."""
    longest = _read(folder / "sentence_bert_config.json").get("max_seq_length")
    modules = _modules(folder)
    pooling = next((one["path"] for one in modules if _kind(one) == "Pooling"), "1_Pooling")
    return VectorRules(
        pooling=_pooling(folder / pooling / "config.json"),
        normalize=any(_kind(one) == "Normalize" for one in modules) if modules else None,
        max_input_tokens=int(longest) if longest else None,
    )


def _modules(folder: Path) -> list[Mapping[str, str]]:
    modules: list[Mapping[str, str]] = _json(folder / "modules.json") or []
    for one in modules:
        if _kind(one) not in ("Transformer", "Pooling", "Normalize"):
            raise ConfigError(f"engine.model: {folder / 'modules.json'}: modules {_kind(one)} are not supported")
        if _kind(one) == "Transformer" and one["path"]:
            raise ConfigError(f"engine.model: {folder / 'modules.json'}: name the folder {one['path']} as the model")
    return modules


def _kind(module: Mapping[str, str]) -> str:
    return module["type"].rpartition(".")[2]


def _pooling(path: Path) -> tuple[str, ...]:
    settings = _read(path)
    named = settings.get("pooling_mode")
    modes = [named] if isinstance(named, str) else named or []
    found = tuple(_NAMES.get(mode, mode) for mode in modes)
    found += tuple(mode for key, mode in _MODES.items() if settings.get(key))
    if unknown := set(found) - set(_MODES.values()):
        raise ConfigError(f"engine.model: {path}: pooling {', '.join(sorted(unknown))} is not supported")
    return found


def _read(path: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = _json(path) or {}
    return found


def _json(path: Path) -> Any:
    """The content of a file; None if there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"engine.model: {path} cannot be read: {error}") from error
