"""All settings of a configuration in words, for --help: from its typed model, so that nothing is written twice.

A setting's sentence is the description of its field, or the comment behind it.

The command line of a configured process: CONFIG.yaml key=value..., and a --help that lists every setting.
"""

import argparse
import ast
import inspect
import io
import os
import sys
import textwrap
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Generic, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_json

from baton.errors import ConfigError
from runtime.config import Config, Loaded, Variables, load

_KINDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    SecretStr: "text",
    Path: "path",
    dict: "keys and values",
}
# The ends of names that say a unit.
_UNITS: Mapping[str, str] = {
    "_seconds": "seconds",
    "_ms": "milliseconds",
    "_bytes": "bytes",
    "_gib": "GiB",
    "_tokens": "tokens",
    "_per_second": "a second",
}
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_NOT_GIVEN = object()
_BY_KIND = "by kind"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `kind` is of its values, with unit and bounds; `of` the kinds of a section that has this setting."""

    key: str
    kind: str
    default: str
    sentence: str
    of: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """The settings of one section."""

    key: str  # empty for those on top
    sentence: str
    settings: tuple[Setting, ...]


def describe(model: type[BaseModel], variables: Variables) -> str:
    """Every setting once, with the name of its environment variable, its default and its sentence."""
    lines = [
        f"settings, each as key=value or as an environment variable {variables.prefix}..., where __ is a dot. Values",
        "are YAML. key=value goes before the environment, and the environment before the file.",
    ]
    for group in groups(model):
        heading = ": ".join(word for word in (group.key, group.sentence) if word)
        lines += ["", *textwrap.wrap(heading, 110)]
        for setting in group.settings:
            of = f" ({', '.join(setting.of)})" if setting.of else ""
            lines.append(f"  {setting.key}{of}: {setting.kind} (default: {setting.default})")
            lines.append(f"      {variables.name_of(setting.key)}")
            lines += textwrap.wrap(setting.sentence, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def groups(model: type[BaseModel]) -> list[Group]:
    """The settings of a configuration, by section: those on top first."""
    return list(_groups(model, "", "", _NOT_GIVEN))


def _groups(model: type[BaseModel], key: str, sentence: str, instance: object) -> Iterator[Group]:
    kinds = _kinds(model)
    settings: dict[str, Setting] = {}
    sections: dict[str, tuple[type[BaseModel], object, str]] = {}
    for kind in kinds:
        values = instance if isinstance(instance, kind) else _NOT_GIVEN
        for name, field in kind.model_fields.items():
            path = f"{key}.{name}" if key else name
            value = getattr(values, name, field.get_default(call_default_factory=True, validated_data={}))
            if section := _section(field.annotation):
                sections.setdefault(path, (section, value, _sentence(kind, name, field)))
            else:
                made = _setting(path, kind, name, value)
                settings[path] = _merged(settings.get(path), made, _name(kind) if len(kinds) > 1 else "")
    yield Group(key, sentence, tuple(settings.values()))
    for path, (section, value, said) in sections.items():
        yield from _groups(section, path, said or _first_paragraph(section), value)


def _kinds(model: type[BaseModel]) -> list[type[BaseModel]]:
    """The model; of one that a `kind` chooses, as the engine's, all that can be chosen."""
    chosen = [kind for each in model.__subclasses__() if "kind" in model.model_fields for kind in _kinds(each)]
    return sorted(chosen, key=_name) or [model]


def _name(kind: type[BaseModel]) -> str:
    values = get_args(kind.model_fields["kind"].annotation)
    return str(values[0]) if values else kind.__name__


def _merged(before: Setting | None, setting: Setting, kind: str) -> Setting:
    """One setting of several kinds is listed once, as its first kind describes it."""
    if before is None:
        return replace(setting, of=(kind,) if kind else ())
    default = before.default if before.default == setting.default else _BY_KIND
    return replace(before, of=(*before.of, kind), default=default)


def _setting(path: str, model: type[BaseModel], name: str, value: object) -> Setting:
    field = model.model_fields[name]
    unit = next((unit for end, unit in _UNITS.items() if f"_{name}".endswith(end)), "")
    bounds = [
        f"{sign} {getattr(rule, bound)}" for rule in field.metadata for bound, sign in _BOUNDS.items()
        if getattr(rule, bound, None) is not None
    ]  # fmt: skip
    kind = ", ".join(word for word in (_words(field.annotation), " ".join(bounds), unit) if word)
    default = "none" if value is None else to_json(value).decode() if value is not PydanticUndefined else "required"
    return Setting(path, kind, default, _sentence(model, name, field))


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section that a field is, also where it may be left out."""
    if get_origin(annotation) in (Union, UnionType):
        found = [section for section in map(_section, get_args(annotation)) if section]
        return found[0] if found else None
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def _words(annotation: Any) -> str:
    """A type in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_words(each) for each in arguments if each is not type(None)))
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin in (tuple, list, frozenset):
        return f"list of {_words(arguments[0])}"
    return _KINDS.get(origin or annotation, "value")


def _sentence(model: type[BaseModel], name: str, field: FieldInfo) -> str:
    if field.description:
        return " ".join(field.description.split())
    for each in model.__mro__:
        if name in vars(each).get("__annotations__", {}) and (comment := _comments(each).get(name)):
            return f"{comment[0].upper()}{comment[1:].rstrip('.')}."
    return ""


@cache
def _comments(model: type) -> Mapping[str, str]:
    """The comments behind the fields of a class; none where its source was not installed."""
    try:
        source = textwrap.dedent(inspect.getsource(model))
    except OSError:
        return {}
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and not token.string.startswith(("# type:", "# noqa"))
    }
    [body] = [node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {
        node.target.id: comment
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if (comment := comments.get(node.end_lineno or 0))
    }


def _first_paragraph(model: type[BaseModel]) -> str:
    return " ".join((inspect.getdoc(model) or "").split("\n\n")[0].split())


@dataclass(frozen=True, slots=True)
class Process(Generic[Config]):
    """A process that is configured: its command, and its configuration. `prefix` is of its environment variables."""

    command: str
    about: str
    model: type[Config]
    prefix: str
    example: str

    def read(self, words: Sequence[str] | None = None) -> tuple[Loaded[Config], bool]:
        """The configuration, and whether it is only to be printed. If it is wrong, exits with 2 after one line."""
        variables = Variables(self.prefix, os.environ)
        parser = _Parser(self.model, variables, prog=self.command, description=self.about)
        parser.add_argument("config", help=f"a YAML file, such as {self.example}")
        parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
        parser.add_argument("--print-config", action="store_true", help="show every setting and its source, and exit")
        arguments = parser.parse_args(words)
        try:
            return load(self.model, arguments.config, arguments.overrides, variables), arguments.print_config
        except ConfigError as error:
            print(error.message, file=sys.stderr)
            raise SystemExit(2) from None


class _Parser(argparse.ArgumentParser):
    """Lists the settings below the options, if asked for help: collecting them needs a while."""

    def __init__(self, model: type[Config], variables: Variables, *, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description)
        self._model = model
        self._variables = variables

    def format_help(self) -> str:
        """The options, then the settings."""
        return f"{super().format_help()}\n{describe(self._model, self._variables)}\n"
