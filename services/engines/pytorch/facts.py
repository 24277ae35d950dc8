"""The facts of a loaded model that the embedded engine reports."""

from services.engines.base import ModelFacts, ModelFiles
from services.engines.kv import KvLayout
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.model.loading import LoadedModel
from services.engines.pytorch.steps.scheduler import SchedulerLimits


def facts_of(
    config: PyTorchConfig,
    model: LoadedModel,
    layout: KvLayout,
    limits: SchedulerLimits,
    files: ModelFiles,
    *,
    kv_blocks: int,
    guided_decoding: bool,
    takes_handoffs: bool,
    load_seconds: float,
) -> ModelFacts:
    """Returns the model's facts; `limits` are those of the engine's scheduler."""
    return ModelFacts(
        name=config.served_name,
        engine="pytorch",
        max_context_tokens=limits.max_context_tokens,
        vocab_size=model.shape.vocab_size,
        max_logprobs=min(config.max_logprobs, model.shape.vocab_size),
        eos_token_ids=model.eos_token_ids,
        layout=layout,
        files=files,
        load_seconds=load_seconds,
        images=model.images,
        guided_decoding=guided_decoding,
        lora=config.lora is not None,
        prompt_logprobs=config.max_logprobs > 0,
        takes_handoffs=takes_handoffs,
        settings=_settings(config, limits, kv_blocks),
    )


def _settings(config: PyTorchConfig, limits: SchedulerLimits, kv_blocks: int) -> tuple[tuple[str, str], ...]:
    return (
        ("kv_blocks", str(kv_blocks)),
        ("max_sequences", str(limits.max_sequences)),
        ("max_step_tokens", str(limits.max_step_tokens)),
        ("max_waiting", str(limits.max_waiting)),
        ("prefix_cache", str(config.prefix_cache).lower()),
    )
