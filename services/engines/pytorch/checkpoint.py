"""A checkpoint folder's files: its fingerprint, and what a router needs of it."""

import hashlib
import json
from pathlib import Path

from services.engine import ModelFiles

_SAMPLES = 64
_SAMPLE_BYTES = 4096


def fingerprint(folder: Path) -> str:
    """Hexadecimal SHA-256 over the configuration and a sample of the weights; cheap, and different for other weights.

    Of every weights file count its size, its beginning with the header, and samples at equal distances.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in _weights(folder):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        with path.open("rb") as file:
            header = min(size, 8 + int.from_bytes(file.read(8), "little")) if path.suffix == ".safetensors" else 0
            file.seek(0)
            digest.update(file.read(min(header, 1 << 24)))
            for index in range(_SAMPLES):
                file.seek(header + (size - header) * index // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))


def model_files(folder: Path) -> ModelFiles:
    """The tokenizer and chat template; empty where the folder has none."""
    tokenizer = folder / "tokenizer.json"
    return ModelFiles(
        tokenizer_json=tokenizer.read_bytes() if tokenizer.is_file() else b"",
        tokenizer_config_json=_text(folder / "tokenizer_config.json"),
        chat_template=_chat_template(folder),
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _chat_template(folder: Path) -> str:
    """From the file of its own, else from the processor's or the tokenizer's configuration."""
    template = _text(folder / "chat_template.jinja")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = template or _default_template(json.loads(_text(folder / name) or "{}").get("chat_template"))
    return template


def _default_template(stored: object) -> str:
    """The one template, or of several named ones the default."""
    if isinstance(stored, str):
        return stored
    named = stored if isinstance(stored, list) else []
    return next((str(entry["template"]) for entry in named if entry.get("name") == "default"), "")
