"""Compares what compiled modules need with what the libraries of a target have, before anything is sent."""

import re
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

# libtorch's C functions, of the stable ABI, and its C++ names: namespaces c10, at and torch.
_OF_TORCH = re.compile(r"^(aoti_torch_|torch_|_ZN[KVr]*(3c10|2at|5torch)|_ZT[VIS]N(3c10|2at|5torch))")


@dataclass(frozen=True, slots=True)
class Missing:
    """A module, and symbols of torch that it needs and the target's torch does not have."""

    module: str
    symbols: tuple[str, ...]

    def __str__(self) -> str:
        shown = ", ".join(self.symbols[:3])
        return f"{self.module} needs {len(self.symbols)} symbols that torch does not have: {shown}"


def symbols_of_torch(wheel: Path) -> frozenset[str]:
    """The symbols that the libraries of a wheel of torch define."""
    found: set[str] = set()
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        for name in archive.namelist():
            if re.fullmatch(r"torch/lib/lib(torch|c10|shm)[^/]*\.so", name):
                found |= set(_names(Path(archive.extract(name, folder)), "--defined-only"))
    if not found:
        raise ValueError(f"{wheel} has no libraries of torch")
    return frozenset(found)


def missing(modules: Iterable[tuple[str, Path]], defined: frozenset[str]) -> Sequence[Missing]:
    """The modules, by their paths in the bundle and on disk, that torch would not load."""
    found = []
    for name, path in modules:
        needed = {each for each in _names(path, "--undefined-only") if _OF_TORCH.match(each)}
        if lacking := tuple(sorted(needed - defined)):
            found.append(Missing(name, lacking))
    return found


def _names(library: Path, which: str) -> list[str]:
    ran = subprocess.run(["nm", "-D", "-P", which, str(library)], capture_output=True, text=True, check=True)
    # Weak symbols (w, v) may stay undefined.
    fields = (line.split() for line in ran.stdout.splitlines())
    return [each[0].partition("@")[0] for each in fields if len(each) > 1 and each[1] not in "wv"]
