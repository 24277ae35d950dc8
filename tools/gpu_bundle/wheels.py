"""Chooses the wheels that a target lacks, and downloads them by pip."""

import email
import re
import subprocess
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

_DOWNLOAD_SECONDS = 900
# pip matches the version of glibc exactly.
_GLIBC = (5, 12, 17, 24, 26, 27, 28, 31, 34, 35, 39)


@dataclass(frozen=True, slots=True)
class Target:
    """A machine: its Python, such as 3.12, and the distributions that it has, with None for an unknown version."""

    python: str
    present: Mapping[str, Version | None]

    def environment(self, extra: str) -> dict[str, str]:
        """The values of environment markers."""
        return {
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "platform_system": "Linux",
            "platform_machine": "x86_64",
            "sys_platform": "linux",
            "os_name": "posix",
            "extra": extra,
        }


@dataclass(frozen=True, slots=True)
class Wheel:
    """A file, its distribution, and what that requires."""

    path: Path
    name: str
    version: Version
    requires: tuple[Requirement, ...]


def read_present(path: Path) -> dict[str, Version | None]:
    """Reads the lines of `pip freeze`, such as `torch==2.11.0+cu130`; `torch` alone leaves its version open."""
    found: dict[str, Version | None] = {}
    for line in path.read_text().splitlines():
        if text := line.partition("#")[0].strip():
            name, _, version = text.partition("==")
            found[canonicalize_name(name.partition(" @")[0].strip())] = Version(version) if version else None
    return found


def read_wheel(path: Path) -> Wheel:
    """Reads the name, version and requirements of a wheel."""
    name, version, _, _ = parse_wheel_filename(path.name)
    with zipfile.ZipFile(path) as archive:
        metadata = next(each for each in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", each))
        message = email.message_from_bytes(archive.read(metadata))
    return Wheel(path, name, version, tuple(map(Requirement, message.get_all("Requires-Dist", []))))


@dataclass(frozen=True, slots=True)
class Chosen:
    """The wheels of a bundle, and each requirement that neither they nor the target meet as it is written."""

    wheels: tuple[Wheel, ...]
    unmet: tuple[str, ...]


class Chooser:
    """Follows requirements as far as the target lacks them. The first requirement of a name decides its version."""

    def __init__(self, target: Target, leave_out: Iterable[str], folder: Path, index: Sequence[str] = ()) -> None:
        self._target = target
        self._leave_out = frozenset(map(canonicalize_name, leave_out))
        self._folder = folder
        self._index = tuple(index)

    def choose(self, requirements: Iterable[str]) -> Chosen:
        """Downloads what is missing. Requirements given here are bundled even if the target has the distribution."""
        asked = [Requirement(each) for each in requirements]
        named = {canonicalize_name(each.name) for each in asked}
        found: dict[str, Wheel] = {}
        wanted: dict[str, list[tuple[str, Requirement]]] = defaultdict(list)
        queue = [("the command", each) for each in asked]
        while queue:
            source, requirement = queue.pop(0)
            name = canonicalize_name(requirement.name)
            wanted[name].append((source, requirement))
            if name in self._leave_out or (name in self._target.present and name not in named):
                continue
            if name not in found:
                found[name] = self._download(requirement)
            queue += [(name, each) for each in self._followed(found[name], requirement.extras)]
            if len(wanted[name]) > 100:
                raise ValueError(f"the requirements of {name} do not end")
        return Chosen(tuple(found.values()), tuple(sorted(set(self._unmet(found, wanted)))))

    def _followed(self, wheel: Wheel, extras: Iterable[str]) -> Iterator[Requirement]:
        for requirement in wheel.requires:
            markers = requirement.marker
            if markers is None or any(markers.evaluate(self._target.environment(extra)) for extra in ["", *extras]):
                yield requirement

    def _unmet(
        self, found: Mapping[str, Wheel], wanted: Mapping[str, Sequence[tuple[str, Requirement]]]
    ) -> Iterator[str]:
        for name, requirements in wanted.items():
            version = found[name].version if name in found else self._target.present.get(name)
            for source, each in requirements:
                text = f"{each.name}{each.specifier}"
                if name not in found and name not in self._target.present:
                    yield f"{source} requires {text}, which is left out"
                elif version is not None and not each.specifier.contains(version, prereleases=True):
                    yield f"{source} requires {text}; it gets {version}"

    def _download(self, requirement: Requirement) -> Wheel:
        text = f"{requirement.name}{requirement.specifier}"
        before = {path.name for path in self._folder.glob("*.whl")}
        for path in self._folder.glob("*.whl"):
            name, version, _, _ = parse_wheel_filename(path.name)
            if name == canonicalize_name(requirement.name) and requirement.specifier.contains(
                version, prereleases=True
            ):
                return read_wheel(path)
        command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps"]
        command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={self._target.python}"]
        command += [f"--platform=manylinux_2_{minor}_x86_64" for minor in _GLIBC]
        command += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64", f"--dest={self._folder}"]
        ran = subprocess.run([*command, *self._index, text], capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS)
        new = [path for path in self._folder.glob("*.whl") if path.name not in before]
        if ran.returncode or len(new) != 1:
            raise ValueError(
                f"pip finds no wheel of {text} for Python {self._target.python}: {ran.stderr.strip()[-400:]}"
            )
        return read_wheel(new[0])
