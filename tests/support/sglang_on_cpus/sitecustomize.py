"""Stand-ins for packages that SGLang imports and does not need on CPUs, where its kernels are torch's operations.

Found by every process that has this folder in its PYTHONPATH. Calling what a stand-in has raises NotImplementedError.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any, ClassVar

_PACKAGES = ("sgl_kernel", "torchvision", "flashinfer")


class _StandIn(ModuleType):
    __path__: ClassVar[list[str]] = []
    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _missing(f"{self.__name__}.{name}")


class _Named(type):
    """A class whose attributes are stand-ins too, such as members of an enumeration."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _missing(f"{cls.__qualname__}.{name}")


def _missing(name: str) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{name} has no stand-in on CPUs")

    return _Named(name, (), {"__init__": fail})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name.partition(".")[0] in _PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """A stand-in is complete when it is made."""


sys.meta_path.append(_Finder())


def _register_host_memory() -> None:
    """SGLang registers its pool as a GPU's memory."""
    try:
        agent = importlib.import_module("nixl_cu13._api").nixl_agent
    except ImportError:
        return
    original = agent.__init__

    def start(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        self.nixl_mems["VRAM"] = self.nixl_mems["cuda"] = self.nixl_mems["DRAM"]

    agent.__init__ = start


_register_host_memory()
