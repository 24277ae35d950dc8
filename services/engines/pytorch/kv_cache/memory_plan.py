"""The GPU memory for the block pool: the free memory, less the need of steps."""

from dataclasses import dataclass
from typing import Any

import torch

from baton.errors import ConfigError
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.model.loading import LoadedModel

_CONTEXT_BYTES = 1 << 30
"""CUDA's own memory in a process: kernels, libraries, and the driver's."""
_WORKSPACE_BYTES = 2 << 30
"""For matrix products, captured graphs, transfers, and an encoder beside the model."""
_SLACK = 1.2
"""The allocator rounds sizes up, and leaves gaps."""
_SAMPLING_WIDTHS = 6
"""Rows of float32 numbers, as long as the vocabulary, that exist at once during sampling."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes that determine a step's memory."""

    step_tokens: int
    max_sequences: int
    hidden_size: int
    intermediate_size: int
    head_numbers: int  # of queries, keys and values, of a token
    vocab_size: int
    width: int  # bytes of a number


def step_bytes(shape: StepShape) -> int:
    """Returns a step's memory beside weights and pool: the peak of one layer, and of the sampling."""
    of_a_token = 6 * shape.hidden_size + 3 * shape.intermediate_size + 2 * shape.head_numbers
    of_a_row = shape.vocab_size * (2 * shape.width + 4 * _SAMPLING_WIDTHS)
    return int(_SLACK * (shape.step_tokens * of_a_token * shape.width + shape.max_sequences * of_a_row))


def pool_bytes(free: int, total: int, allocated: int, share: float, step: int) -> int:
    """Returns the pool's bytes on a GPU of `total` bytes, of which this process has `allocated` and may take a `share`.

    The result does not depend on the order in which several workers start, as long as their shares sum to at most 1.
    Raises ConfigError if nothing is left.
    """
    ours = int(total * share) - allocated - _CONTEXT_BYTES
    size = min(free, ours) - step - _WORKSPACE_BYTES
    if size <= 0:
        gib = [f"{number / 2**30:.1f}" for number in (total, free, total * share, allocated, step + _WORKSPACE_BYTES)]
        raise ConfigError(
            f"engine.gpu_memory_share: nothing is left for the KV cache: of {gib[0]} GiB {gib[1]} are free, this "
            f"worker may take {gib[2]}, its weights have {gib[3]}, and its steps need {gib[4]}"
        )
    return size


STANDBY_BYTES = 3 << 29
"""For a process that stands by: its context, kernels, and the workspace of matrix products."""


def plan_pool(config: PyTorchConfig, model: LoadedModel, step_tokens: int, reserved: int = 0) -> int:
    """Returns the pool's bytes on this model's GPU, as configured or computed, without those that are reserved.

    Raises ConfigError.
    """
    free, total = torch.cuda.mem_get_info(model.device)
    free -= reserved
    if config.kv_cache_fraction is not None:
        return int(free * config.kv_cache_fraction)
    hidden_size, intermediate_size = _widths(model)
    shape = StepShape(
        step_tokens=step_tokens,
        max_sequences=config.max_sequences,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        head_numbers=(model.shape.query_heads + 2 * model.shape.kv_heads) * model.shape.head_dim,
        vocab_size=model.shape.vocab_size,
        width=model.dtype.itemsize,
    )
    # Memory that the allocator has cached without using it is available too.
    allocated = torch.cuda.memory_allocated(model.device)
    cached = torch.cuda.memory_reserved(model.device) - allocated
    used = allocated + model.kept_bytes
    return pool_bytes(free + cached, total, used, config.gpu_memory_share, step_bytes(shape))


def _widths(model: LoadedModel) -> tuple[int, int]:
    """The hidden and the intermediate size, of all experts that compute a token together."""
    if model.fused is not None:
        return model.fused.embedding.shape[1], model.fused.layers[0].down.weight.shape[1]
    module: Any = model.module
    text = module.config.get_text_config()
    experts = int(getattr(text, "num_experts_per_tok", None) or 1)
    return int(text.hidden_size), int(text.intermediate_size) * experts
