"""Configuration: one YAML file, environment variables and `key=value` overrides, in a typed, frozen model.

Unknown keys are refused. settings.py reads a process's, and shows all settings in its --help.
"""

import difflib
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, to_jsonable_python

from baton.errors import ConfigError

Source = Literal["default", "file", "environment", "override"]


class Section(BaseModel):
    """A part of a configuration: frozen, and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Config = TypeVar("Config", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[Config]):
    """A configuration, and where each of its values comes from, by the path of its key (`retry.budget`)."""

    value: Config
    sources: Mapping[str, Source]

    def describe(self) -> list[str]:
        """Every effective value, as lines of `key = value  # source`. Secrets stay hidden."""
        return [f"{key} = {_shown(value)}  # {self.sources[key]}" for key, value in leaves(self.value)]


@dataclass(frozen=True, slots=True)
class Variables:
    """The environment variables that begin with `prefix`: a key in capitals, with two underscores for a dot."""

    prefix: str
    values: Mapping[str, str]

    def overrides(self) -> Iterator[tuple[str, str, str]]:
        """Name, key and value of each variable; sections before their keys."""
        for name in sorted(self.values):
            if name.startswith(self.prefix):
                yield name, name.removeprefix(self.prefix).lower().replace("__", "."), self.values[name]

    def name_of(self, key: str) -> str:
        """The variable that sets a key."""
        return self.prefix + key.upper().replace(".", "__")


NO_VARIABLES = Variables("", {})


def load(
    model: type[Config], path: str | Path, overrides: Sequence[str] = (), variables: Variables = NO_VARIABLES
) -> Loaded[Config]:
    """Reads the YAML file at `path`, then `variables`, then `overrides` such as `retry.budget=3`; values are YAML too.

    An override or a variable replaces the whole value of its key, also where that is a section or a list. Raises
    ConfigError that names the file, the variable or the override, and the path of every key that is wrong.
    """
    document = _Document(str(path), _read(Path(path)))
    for name, key, text in variables.overrides():
        document.override(_Override(key, "environment", name, name), text)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(f"override {override!r}: expected key=value")
        document.override(_Override(key, "override", "override", f"override {override!r}"), text)
    try:
        value = model.model_validate(document.tree)
    except ValidationError as error:
        raise ConfigError("; ".join(document.explain(model, error))) from None
    return Loaded(value, {key: document.source(key) for key, _ in leaves(value)})


@dataclass(frozen=True, slots=True)
class _Override:
    key: str
    source: Source
    origin: str  # in messages
    words: str  # the whole of it, in messages; of a variable without its value


class _Document:
    """The file, with the variables and overrides applied to it, before it is validated."""

    def __init__(self, file: str, tree: dict[str, Any]) -> None:
        self.tree = tree
        self._file = file
        self._overrides: list[_Override] = []
        self._added: dict[str, _Override] = {}  # the sections that are not in the file, by the first to name one

    def override(self, override: _Override, text: str) -> None:
        """Replaces the value of a key by a YAML text, which messages leave out: it may be a secret."""
        section = self.tree
        *parents, name = override.key.split(".")
        for depth, parent in enumerate(parents, 1):
            if section.get(parent) is None:
                section[parent] = {}
                self._added.setdefault(".".join(parents[:depth]), override)
            section = section[parent]
            if not isinstance(section, dict):
                raise ConfigError(f"{override.words}: {parent} has no keys of its own")
        try:
            section[name] = yaml.load(text, _UniqueKeys)
        except yaml.YAMLError as error:
            problem = getattr(error, "problem", None) or "it has characters that YAML does not allow"
            raise ConfigError(f"{override.origin}: {override.key}: is not YAML: {problem}") from None
        self._overrides.append(override)

    def source(self, key: str) -> Source:
        """The last that has set it."""
        if override := self._override_of(key):
            return override.source
        return "file" if self._has(key) else "default"

    def explain(self, model: type[BaseModel], error: ValidationError) -> Iterator[str]:
        for fault in error.errors(include_url=False, include_input=False, include_context=False):
            key = self._path(fault)
            override = self._override_of(key) or self._added.get(key)
            origin = override.origin if override else self._file
            message = fault["msg"].removeprefix("Value error, ")
            if fault["type"] == "extra_forbidden":
                message = "unknown key" + _suggestion(model, fault["loc"])
            yield f"{origin}: {key}: {message}" if key else f"{origin}: {message}"

    def _override_of(self, key: str) -> _Override | None:
        found = [override for override in self._overrides if f"{key}.".startswith(f"{override.key}.")]
        return found[-1] if found else None

    def _has(self, key: str) -> bool:
        section: Any = self.tree
        for name in key.split("."):
            if not isinstance(section, dict) or name not in section:
                return False
            section = section[name]
        return True

    def _path(self, fault: ErrorDetails) -> str:
        """pydantic's location as the user wrote it: without the tags of unions, which are in no file."""
        path = ""
        value: Any = self.tree
        for part in fault["loc"]:
            if isinstance(part, int) and isinstance(value, list):
                path, value = f"{path}[{part}]", value[part]
            elif isinstance(value, dict) and part in value:
                path, value = f"{path}.{part}", value[part]
        if fault["type"] == "missing":
            path = f"{path}.{fault['loc'][-1]}"
        return path.removeprefix(".")


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text") from error
    tree = _parse(str(path), text)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected keys and values")
    return tree


def _parse(origin: str, text: str) -> Any:
    try:
        return yaml.load(text, _UniqueKeys)
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: is not YAML: {' '.join(str(error).split())}") from None


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key may not come twice: the second would win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key, (position, _) in zip(keys, node.value, strict=True):
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", position.start_mark
                )
        return super().construct_mapping(node, deep)


def _suggestion(model: type[BaseModel], location: Sequence[int | str]) -> str:
    names = [name for found in _models_at(model, location[:-1]) for name in found.model_fields]
    close = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _models_at(model: type[BaseModel], location: Sequence[int | str]) -> list[type[BaseModel]]:
    models = [model]
    for part in location:
        # A part that is no field is an index, or the tag of a union: the models are the same still.
        fields = [found.model_fields[str(part)] for found in models if str(part) in found.model_fields]
        models = [inner for field in fields for inner in _models_in(field.annotation)] or models
    return models


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        # Subclasses too: a section may be of one that is chosen by its content.
        yield from (annotation, *annotation.__subclasses__())
    for argument in get_args(annotation):
        yield from _models_in(argument)


def leaves(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a configuration, by their paths, with their values."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
    return json.dumps(to_jsonable_python(value), ensure_ascii=False)
