"""Imports a package that brings an engine, and checks its version."""

import importlib
from dataclasses import dataclass
from types import ModuleType

from packaging.version import InvalidVersion, Version

from baton.errors import ConfigError


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
            why = " ".join(str(error).split())
            needed = f"engine.kind {self.kind} needs {self.title}, which cannot be imported ({why})"
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
