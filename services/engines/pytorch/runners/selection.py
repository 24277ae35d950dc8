"""The choice of the runner: the fused one where it supports the model, else transformers' modules."""

from importlib.util import find_spec

import structlog
import torch

from baton.errors import ConfigError
from services.engines.kv import KvLayout
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.kernels.paged_ops import PagedOps, TorchOps
from services.engines.pytorch.lora.layers import LoraLayers
from services.engines.pytorch.model.fused_model import FusedModel, FusedWeights, why_not
from services.engines.pytorch.model.loading import LoadedModel
from services.engines.pytorch.parallel.ranks import Ranks
from services.engines.pytorch.runners.batch import KvCache
from services.engines.pytorch.runners.fused_runner import Announce, FusedRunner, Sizes
from services.engines.pytorch.runners.runner import LibraryRunner, StepRunner

_log = structlog.get_logger(__name__)


def open_runner(
    config: PyTorchConfig,
    model: LoadedModel,
    pool: torch.Tensor,
    layout: KvLayout,
    sizes: Sizes,
    lora: LoraLayers | None = None,
) -> StepRunner:
    """Returns the runner that `execution` asks for. Raises ConfigError if that is the fused one and it is not
    supported.
    """
    obstacle = why_not_fused(config, model)
    if config.execution == "fused" and obstacle:
        raise ConfigError(f"engine.execution: the model cannot be computed by the fused kernels: {obstacle}")
    if obstacle:
        _log.info("steps are computed by transformers' modules", reason=obstacle)
        return LibraryRunner(model, KvCache(pool, layout), lora)
    return fused_runner(model, pool, sizes)


def fused_runner(
    model: LoadedModel, pool: torch.Tensor, sizes: Sizes, ranks: Ranks | None = None, announce: Announce | None = None
) -> FusedRunner:
    """Returns the fused runner, of a whole model or of one rank's part. `announce` tells the other ranks each step."""
    weights = model.fused or FusedWeights.of(model.module, model.shape.max_context_tokens)
    fused = FusedModel(weights, model.shape, pool, _ops(model.device), ranks)
    return FusedRunner(fused, sizes, model.device, announce)


def why_not_fused(config: PyTorchConfig, model: LoadedModel) -> str:
    """Returns why the fused runner does not compute this model as it is configured; empty if it does."""
    if config.execution == "library":
        return "engine.execution says so"
    if model.device.type == "cuda" and find_spec("triton") is None:
        return "Triton is not installed"
    if model.device.type == "cpu" and config.execution == "auto":
        return "on a CPU they would gain nothing"
    if config.lora is not None:
        return "they do not compute adapters (engine.lora)"
    if config.speculation is not None:
        return "they do not verify drafts (engine.speculation)"
    return "" if model.fused is not None else why_not(model.module.config)  # type: ignore[arg-type]


def _ops(device: torch.device) -> PagedOps:
    if device.type == "cpu":
        return TorchOps()
    from services.engines.pytorch.kernels.triton_ops import TritonOps

    return TritonOps()
