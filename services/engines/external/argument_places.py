"""The arguments of an engine from several places: a typed section, a YAML file and a JSON text, the later the stronger.

Sections are merged key by key; lists are replaced whole. Each value remembers its source.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import yaml
from pydantic import ValidationError

from baton.errors import ConfigError
from runtime.config import Section, leaves

_SECTION = "engine.args"
_OVERRIDE = "engine.override_engine_args"
_GUARD = "guard"
_DEFAULT = "default"

Arguments = TypeVar("Arguments", bound=Section)
Arguments_co = TypeVar("Arguments_co", bound=Section, covariant=True)


@dataclass(frozen=True, slots=True)
class MergedArguments(Generic[Arguments]):
    """Arguments, and the source of each value that was set, by the path of its key (`kv_cache_config.dtype`)."""

    value: Arguments
    sources: Mapping[str, str]

    def source(self, key: str) -> str:
        """The origin of this key's value."""
        return self.sources.get(key, _DEFAULT)

    def describe(self) -> list[str]:
        """Every value, as lines of `key = value  # source`."""
        return [f"{key} = {json.dumps(value)}  # {self.source(key)}" for key, value in leaves(self.value)]

    def forced(self, key: str, value: bool | int) -> "MergedArguments[Arguments]":
        """The same arguments with a value that a check has set."""
        section, _, name = key.rpartition(".")
        changed: Any = {name: value}
        if section:
            changed = {section: getattr(self.value, section).model_copy(update=changed)}
        return MergedArguments(self.value.model_copy(update=changed), {**self.sources, key: _GUARD})


@dataclass(frozen=True, slots=True)
class ArgumentPlace:
    """Arguments as one place has them; `name` is how errors call it."""

    name: str
    tree: Mapping[str, Any]


def read_places(args: Section, extra: Path | None, override: str) -> list[ArgumentPlace]:
    """Returns the places that are set, the weakest first. Raises ConfigError for a file or text that cannot be read."""
    places = [ArgumentPlace(_SECTION, args.model_dump(mode="json", exclude_unset=True))]
    if extra is not None:
        places.append(ArgumentPlace(str(extra), _read_yaml(extra)))
    if override:
        places.append(ArgumentPlace(_OVERRIDE, _read_json(override)))
    return places


class HasArguments(Protocol[Arguments_co]):
    """A configuration with the three places of an engine's arguments (ExternalEngineConfig)."""

    @property
    def args(self) -> Arguments_co: ...
    @property
    def extra_engine_args(self) -> Path | None: ...
    @property
    def override_engine_args(self) -> str: ...


def resolve(config: HasArguments[Arguments]) -> MergedArguments[Arguments]:
    """Merges the three places. Raises ConfigError with the place and the key of every error."""
    return merge(type(config.args), read_places(config.args, config.extra_engine_args, config.override_engine_args))


def merge(kind: type[Arguments], places: Sequence[ArgumentPlace]) -> MergedArguments[Arguments]:
    """Merges the places, after checking each one, so that an error names its place even if another one overrides it.

    Raises ConfigError with the place and the key of every error.
    """
    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for place in places:
        validated(kind, place)
        _merge(merged, place.tree)
        sources.update((key, place.name) for key in _keys(place.tree))
    return MergedArguments(validated(kind, ArgumentPlace("engine", merged)), sources)


def validated(kind: type[Arguments], place: ArgumentPlace) -> Arguments:
    """Returns the typed arguments of one place. Raises ConfigError naming the place and every wrong key."""
    try:
        return kind.model_validate(place.tree)
    except ValidationError as error:
        raise ConfigError("; ".join(_faults(place.name, error))) from None


def _faults(place: str, error: ValidationError) -> Iterator[str]:
    for fault in error.errors(include_url=False, include_input=False, include_context=False):
        message = "unknown key" if fault["type"] == "extra_forbidden" else fault["msg"]
        yield f"{place}: {'.'.join(map(str, fault['loc']))}: {message}"


def _merge(into: dict[str, Any], tree: Mapping[str, Any]) -> None:
    for key, value in tree.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = deepcopy(value)  # a later place must not change an earlier one's


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


def _keys(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
