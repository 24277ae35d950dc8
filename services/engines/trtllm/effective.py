"""The arguments that are in effect: flags, then a YAML file, then JSON, each value with the place it came from."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from rpc.errors import ConfigError
from services.engines.trtllm.arguments import EngineArguments
from services.engines.trtllm.config import TrtllmConfig

_FLAG = "engine.args"
_OVERRIDE = "engine.override_engine_args"
_GUARD = "guard"
_DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Effective:
    """Arguments, and the source of each value that was set, by the path of its key (`kv_cache_config.dtype`)."""

    value: EngineArguments
    sources: Mapping[str, str]

    def source(self, key: str) -> str:
        """Where the value of this key comes from."""
        return self.sources.get(key, _DEFAULT)

    def describe(self) -> list[str]:
        """Every value, as lines of `key = value  # source`."""
        return [f"{key} = {json.dumps(value)}  # {self.source(key)}" for key, value in _leaves(self.value)]

    def guarded(self, key: str, value: bool | int) -> "Effective":
        """The same, with a value that a guard has chosen."""
        section, _, name = key.rpartition(".")
        changed: Any = {name: value}
        if section:
            changed = {section: getattr(self.value, section).model_copy(update=changed)}
        return Effective(self.value.model_copy(update=changed), {**self.sources, key: _GUARD})


def resolve(config: TrtllmConfig) -> Effective:
    """Merges the three places. Raises ConfigError that names the place and the key of whatever is wrong."""
    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for place, tree in _places(config):
        _check(place, tree)
        _merge(merged, tree)
        sources.update((key, place) for key in _keys(tree))
    return Effective(_validated(merged, "engine"), sources)


def _places(config: TrtllmConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    yield _FLAG, config.args.model_dump(mode="json", exclude_unset=True)
    if config.extra_engine_args is not None:
        yield str(config.extra_engine_args), _read_yaml(config.extra_engine_args)
    if config.override_engine_args:
        yield _OVERRIDE, _read_json(config.override_engine_args)


def _merge(into: dict[str, Any], tree: Mapping[str, Any]) -> None:
    for key, value in tree.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    return _mapping(str(path), {} if tree is None else tree)


def _read_json(text: str) -> dict[str, Any]:
    try:
        return _mapping(_OVERRIDE, json.loads(text))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{_OVERRIDE}: is not JSON: {error}") from None


def _mapping(place: str, tree: object) -> dict[str, Any]:
    if not isinstance(tree, dict):
        raise ConfigError(f"{place}: expected keys and values")
    return tree


def _check(place: str, tree: Mapping[str, Any]) -> None:
    """What is wrong in one place is named by that place, before another one hides it."""
    if "dynamic_batch_config" in (tree.get("scheduler_config") or {}):
        raise ConfigError(
            f"{place}: scheduler_config.dynamic_batch_config has no effect in the PyTorch backend; leave it out"
        )
    _validated(tree, place)


def _validated(tree: Mapping[str, Any], place: str) -> EngineArguments:
    try:
        return EngineArguments.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("; ".join(_faults(place, error))) from None


def _faults(place: str, error: ValidationError) -> Iterator[str]:
    for fault in error.errors(include_url=False, include_input=False, include_context=False):
        message = "unknown key" if fault["type"] == "extra_forbidden" else fault["msg"]
        yield f"{place}: {'.'.join(map(str, fault['loc']))}: {message}"


def _keys(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _leaves(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
