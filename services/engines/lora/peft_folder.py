"""Reads an adapter in PEFT's layout: adapter_config.json and adapter_model.safetensors.

Only what is computed exactly is accepted. Every other setting is refused by the name of its key: an adapter that is
served without one of its settings would answer differently from the one that was trained.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from baton.errors import ConfigError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PIECE_BYTES = 1 << 20
_PREFIX = "base_model.model."
_WEIGHT = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])\.weight")

# Keys that do not change what the saved matrices compute.
_HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_rslora",
}
# Keys with other values than "unset" that are accepted.
_ACCEPTED: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),
    "peft_type": ("LORA",),
}


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The settings of an adapter that decide what it computes."""

    rank: int
    scale: float
    is_target: Callable[[str], bool]  # whether a module of this name is adapted


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter's part in one module: `down` `[rank, in]`, and `up` `[out, rank]`, which includes the scale."""

    down: torch.Tensor
    up: torch.Tensor


def content_digest(folder: Path) -> str:
    """Returns the hexadecimal SHA-256 of both files. Blocking. Raises ConfigError if one cannot be read."""
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        try:
            with (folder / name).open("rb") as file:
                digest.update(f"{name}:{(folder / name).stat().st_size}\n".encode())
                while piece := file.read(_PIECE_BYTES):
                    digest.update(piece)
        except OSError as error:
            raise ConfigError(f"{name}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def read_peft_config(folder: Path, max_rank: int) -> PeftConfig:
    """Reads the configuration. Raises ConfigError naming the key that is missing, wrong or not supported."""
    try:
        keys = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{CONFIG}: cannot be read: {error}") from error
    if not isinstance(keys, dict):
        raise ConfigError(f"{CONFIG}: is not a JSON object")
    _refuse_unsupported(keys)
    rank = keys.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ConfigError(f"r: {rank!r} is not a positive integer")
    if rank > max_rank:
        raise ConfigError(f"r: {rank} is over engine.lora.max_rank, {max_rank}")
    alpha = keys.get("lora_alpha")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise ConfigError(f"lora_alpha: {alpha!r} is not a number")
    scale = alpha / math.sqrt(rank) if keys.get("use_rslora") else alpha / rank
    return PeftConfig(rank, scale, _targets(keys.get("target_modules")))


def read_weights(folder: Path, config: PeftConfig) -> dict[str, LowRank]:
    """Returns the matrices by the module's name in the model that was trained, in float32, on the CPU.

    Raises ConfigError naming the weight that is unexpected, missing, of a wrong shape, or not finite.
    """
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"{WEIGHTS}: cannot be read: {error}") from error
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = _WEIGHT.fullmatch(name.removeprefix(_PREFIX))
        if found is None:
            raise ConfigError(f"{WEIGHTS}: {name} is not a matrix of LoRA, and is not supported")
        if not config.is_target(found["module"]):
            raise ConfigError(f"{WEIGHTS}: {name} is not among target_modules")
        pairs.setdefault(found["module"], {})[found["which"]] = tensor.float()
    if not pairs:
        raise ConfigError(f"{WEIGHTS}: has no weights")
    return {module: _pair(module, pair, config) for module, pair in pairs.items()}


def read_adapter(folder: Path, max_rank: int, digest: str) -> dict[str, LowRank]:
    """Returns the matrices, as `read_weights` does, of the content that has this digest. Blocking.

    Raises ConfigError also if the files have other content.
    """
    weights = read_weights(folder, read_peft_config(folder, max_rank))
    if content_digest(folder) != digest:
        raise ConfigError("its files have changed since the folder was read; load it again")
    return weights


def _pair(module: str, pair: Mapping[str, torch.Tensor], config: PeftConfig) -> LowRank:
    for which in "AB":
        if which not in pair:
            raise ConfigError(f"{WEIGHTS}: {module}.lora_{which}.weight is missing")
        if not bool(torch.isfinite(pair[which]).all()):
            raise ConfigError(f"{WEIGHTS}: {module}.lora_{which}.weight has values that are not finite")
    down, up = pair["A"], pair["B"]
    if down.dim() != 2 or up.dim() != 2 or not down.shape[0] == up.shape[1] == config.rank:
        shapes = f"{list(down.shape)} and {list(up.shape)}"
        raise ConfigError(f"{WEIGHTS}: {module}: matrices of {shapes} do not have the rank r, {config.rank}")
    return LowRank(down, up * config.scale)


def _refuse_unsupported(keys: Mapping[str, Any]) -> None:
    if keys.get("peft_type") != "LORA":
        raise ConfigError(f"peft_type: {keys.get('peft_type')!r} is not supported; expected LORA")
    for key, value in keys.items():
        if key in _HARMLESS or not value or value in _ACCEPTED.get(key, ()):
            continue
        raise ConfigError(f"{key}: {json.dumps(value)[:100]} is not supported")


def _targets(given: object) -> Callable[[str], bool]:
    """PEFT's rule: a list holds names or ends of names; a text is a regular expression for whole names."""
    if isinstance(given, list) and given and all(isinstance(name, str) for name in given):
        names = set(given)
        return lambda module: any(module == name or module.endswith(f".{name}") for name in names)
    if given == "all-linear":
        return lambda _module: True
    if isinstance(given, str) and given:
        try:
            pattern = re.compile(given)
        except re.error as error:
            raise ConfigError(f"target_modules: {given[:100]!r} is not a regular expression: {error}") from error
        return lambda module: pattern.fullmatch(module) is not None
    raise ConfigError("target_modules: is missing")
