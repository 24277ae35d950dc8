"""The settings that must be the same on all ranks of a group, and their differences in words."""

from collections.abc import Mapping

from baton.errors import ConfigError
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.model import checkpoint
from services.engines.pytorch.model.loading import choose_device

_SAME = ("tensor_parallel_size", "dtype", "block_tokens", "max_context_tokens", "max_sequences", "max_step_tokens")


def settings_of(config: PyTorchConfig) -> dict[str, str]:
    """Returns the settings of this rank that the others must have too. Raises ConfigError without a checkpoint."""
    try:
        model = checkpoint.fingerprint(config.model)
    except OSError as error:
        raise ConfigError(f"engine.model: {config.model} cannot be read: {error}") from error
    values = {name: getattr(config, name) for name in _SAME}
    return {name: str(value) for name, value in values.items()} | {
        "device": choose_device(config).type,
        "model": model,
    }


def differences(rank: int, settings: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """Returns what is different on rank `rank`, naming the keys; empty if nothing is."""
    found = [
        f"engine.{name} is {settings.get(name)} on rank {rank} and {value} on rank 0"
        for name, value in expected.items()
        if settings.get(name) != value
    ]
    return "; ".join(found)
