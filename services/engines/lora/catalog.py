"""The folder of adapters: each folder below it with an adapter_config.json is an adapter of that name."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ConfigError
from services.engines.lora.inventory import LoraRejection, RankedLora
from services.engines.lora.peft_folder import CONFIG, WEIGHTS, content_digest, read_peft_config
from services.engines.prompt import Lora

# A name is part of a model's name, `<model>:<adapter>`.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}")

_Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """An adapter of the folder. `stamp` changes with its files."""

    ranked: RankedLora
    folder: Path
    stamp: _Stamp


@dataclass(frozen=True, slots=True)
class Catalog:
    """The adapters that the folder contained when it was read."""

    entries: Mapping[str, CatalogEntry]
    rejected: tuple[LoraRejection, ...] = ()


NOTHING = Catalog({})


def read_catalog(folder: Path, max_rank: int, known: Catalog = NOTHING) -> Catalog:
    """Reads the folder. Files that have not changed since `known` are not read again. Blocking.

    Raises ConfigError if there is no such folder.
    """
    try:
        children = sorted(child for child in folder.iterdir() if (child / CONFIG).is_file())
    except OSError as error:
        raise ConfigError(f"engine.lora.folder: {folder} cannot be read: {error.strerror}") from error
    entries: dict[str, CatalogEntry] = {}
    rejected: list[LoraRejection] = []
    for child in children:
        try:
            entries[child.name] = _read(child, max_rank, known.entries.get(child.name))
        except ConfigError as error:
            rejected.append(LoraRejection(child.name, error.message))
    return Catalog(entries, tuple(rejected))


def _read(folder: Path, max_rank: int, known: CatalogEntry | None) -> CatalogEntry:
    if not _NAME.fullmatch(folder.name):
        raise ConfigError("the folder's name must be letters, digits, or any of _ . -")
    stamp = _stamp(folder)
    if known is not None and known.stamp == stamp:
        return known
    rank = read_peft_config(folder, max_rank).rank
    return CatalogEntry(RankedLora(Lora(folder.name, content_digest(folder)), rank), folder, stamp)


def _stamp(folder: Path) -> _Stamp:
    """Identity, size and time of each file: other content of the same file changes one of them."""
    try:
        found = [(folder / name).stat() for name in (CONFIG, WEIGHTS)]
    except OSError as error:
        raise ConfigError(f"{WEIGHTS}: cannot be read: {error.strerror}") from error
    return tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in found)
