"""The command line of a configured process: CONFIG.yaml key=value..., and a --help that lists every setting."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from baton.errors import ConfigError
from runtime import settings
from runtime.config import Config, Loaded, Variables, load


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
        return f"{super().format_help()}\n{settings.describe(self._model, self._variables)}\n"
