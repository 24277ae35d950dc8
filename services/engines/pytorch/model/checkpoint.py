"""A checkpoint folder's files: its fingerprint, and the files that a router needs."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from baton.errors import ConfigError
from services.engines.base import ModelFiles

_WHOLE_BYTES = 64 << 20
_SAMPLES = 256
_SAMPLE_BYTES = 64 << 10


def fingerprint(folder: Path) -> str:
    """Returns the hexadecimal SHA-256 of the configuration and the weights; large files are sampled.

    Files of up to 64 MiB are hashed whole. Of larger ones it hashes the size, the header, and 256 samples at equal
    distances: training changes every weight, so other weights differ in the samples.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in _weights(folder):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        with path.open("rb") as file:
            for piece in _whole(file) if size <= _WHOLE_BYTES else _sampled(file, size):
                digest.update(piece)
    return digest.hexdigest()


def changes(folder: Path) -> list[tuple[str, int, int, int]]:
    """Name, size and times of the last change of each file of weights: on one host they differ also after a change that
    the samples of `fingerprint` miss.
    """
    found = [(path.name, path.stat()) for path in _weights(folder)]
    return [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in found]


def _weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))


def _whole(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(1 << 20):
        yield piece


def _sampled(file: BinaryIO, size: int) -> Iterator[bytes]:
    header = min(8 + int.from_bytes(file.read(8), "little"), 16 << 20)
    yield file.read(header - 8)
    for index in range(_SAMPLES):
        file.seek(header + (size - header) * index // _SAMPLES)
        yield file.read(_SAMPLE_BYTES)


def model_files(folder: Path) -> ModelFiles:
    """Returns the tokenizer and chat template; empty if the folder has none."""
    tokenizer = folder / "tokenizer.json"
    return ModelFiles(
        tokenizer_json=tokenizer.read_bytes() if tokenizer.is_file() else b"",
        tokenizer_config_json=_text(folder / "tokenizer_config.json"),
        chat_template=_chat_template(folder),
    )


def end_ids(folder: Path, model: dict[str, Any]) -> tuple[int, ...]:
    """The ids that end an answer, from generation_config.json or else from `model`; empty if neither names one.

    Raises ConfigError as read_json does.
    """
    path = folder / "generation_config.json"
    found = (read_json(path) if path.is_file() else {}).get("eos_token_id", model.get("eos_token_id"))
    ends = found if isinstance(found, list) else [found]
    return tuple(int(each) for each in ends if each is not None)


def read_json(path: Path) -> dict[str, Any]:
    """The keys and values of a file of a checkpoint. Raises ConfigError if it has none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected keys and values")
    return content


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _chat_template(folder: Path) -> str:
    """Returns the template of its own file, else that of the processor's or the tokenizer's configuration."""
    template = _text(folder / "chat_template.jinja")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = template or _default_template(json.loads(_text(folder / name) or "{}").get("chat_template"))
    return template


def _default_template(stored: object) -> str:
    """Returns the only template, or the default of several named ones."""
    if isinstance(stored, str):
        return stored
    named = stored if isinstance(stored, list) else []
    return next((str(entry["template"]) for entry in named if entry.get("name") == "default"), "")
