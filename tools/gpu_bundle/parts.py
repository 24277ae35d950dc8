"""Writes files as parts of at most a given size, each a concatenation of xz streams of tar files."""

import hashlib
import io
import json
import lzma
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tools.gpu_bundle.cuda import only_for

_PIECE_BYTES = 24 << 20
# Zip files of wheels say it too, but not all of them rightly.
_PROGRAMS = (b"\x7fELF", b"#!")


@dataclass(frozen=True, slots=True)
class Entry:
    """A file on disk, and its path in the bundle."""

    name: str
    path: Path

    @property
    def size(self) -> int:
        return self.path.stat().st_size


@dataclass(frozen=True, slots=True)
class Piece:
    """Some files, packed, and the digest of each."""

    packed: bytes
    digests: dict[str, str]


def write_parts(entries: Sequence[Entry], architecture: int, limit: int, folder: Path) -> list[str]:
    """Writes part-0.tar.xz and so on, and manifest.json. Raises ValueError for a file that fits no part."""
    pack = partial(_pack, architecture)
    with ProcessPoolExecutor(2) as pool:
        packed = [*pool.map(pack, pieces(entries))]
    packed.sort(key=lambda piece: len(piece.packed), reverse=True)
    parts: list[list[Piece]] = []
    for piece in packed:
        if len(piece.packed) > limit:
            raise ValueError(f"{', '.join(piece.digests)}: {len(piece.packed)} bytes packed, over {limit} of a part")
        room = next((part for part in parts if _size(part) + len(piece.packed) <= limit), None)
        if room is None:
            parts.append(room := [])
        room.append(piece)
    return _write(parts, folder)


def pieces(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Groups files of a kind, each group of at most 24 MiB or one file."""
    group: list[Entry] = []
    for entry in sorted(entries, key=lambda entry: (entry.path.suffix, entry.name)):
        is_full = sum(each.size for each in group) + entry.size > _PIECE_BYTES
        if group and (is_full or entry.path.suffix != group[-1].path.suffix):
            yield group
            group = []
        group.append(entry)
    if group:
        yield group


def _size(part: Iterable[Piece]) -> int:
    return sum(len(piece.packed) for piece in part)


def _write(parts: Sequence[Sequence[Piece]], folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    named = {f"part-{number}.tar.xz": part for number, part in enumerate(parts)}
    manifest = {
        "parts": {name: _digest(b"".join(piece.packed for piece in part)) for name, part in named.items()},
        "files": {file: digest for part in parts for piece in part for file, digest in piece.digests.items()},
    }
    for name, part in named.items():
        (folder / name).write_bytes(b"".join(piece.packed for piece in part))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return list(named)


def _pack(architecture: int, group: Sequence[Entry]) -> Piece:
    made, digests = io.BytesIO(), {}
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in group:
            content = entry.path.read_bytes()
            if entry.path.suffix == ".so" or ".so." in entry.path.name:
                content = only_for(content, architecture)
            member = tarfile.TarInfo(entry.name)
            member.size, member.mode = len(content), 0o755 if content.startswith(_PROGRAMS) else 0o644
            archive.addfile(member, io.BytesIO(content))
            digests[entry.name] = _digest(content)
    return Piece(lzma.compress(made.getvalue(), preset=4), digests)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
