"""Loads TensorRT-LLM's own objects with the arguments in effect."""

from typing import Any

from pydantic import BaseModel

from baton.errors import ConfigError
from services.engines.external.package import loading
from services.engines.trtllm.config import (
    AUTODEPLOY_UNKNOWN,
    ENCODER_KNOWN,
    KvCacheArguments,
    SpeculativeArguments,
    TrtllmConfig,
)
from services.engines.trtllm.package import Package
from services.engines.trtllm.resolved_args import ResolvedArgs

_SPECULATIVE = {
    "Eagle": "EagleDecodingConfig",
    "Eagle3": "Eagle3DecodingConfig",
    "MTP": "MTPDecodingConfig",
    "NGram": "NGramDecodingConfig",
    "Draft_Target": "DraftTargetDecodingConfig",
}
_ALWAYS = {
    "max_batch_size",
    "max_num_tokens",
    "enable_chunked_prefill",
    "kv_cache_config",
    "return_perf_metrics",
    "enable_iter_perf_stats",
}


def load(config: TrtllmConfig, effective: ResolvedArgs, package: Package) -> Any:
    """Loads the LLM, which blocks for minutes. Raises ConfigError with the version for arguments that it refuses."""

    with loading(f"trtllm {package.version}", config.model):
        arguments = _arguments(config, effective, package)
        # Only its guided decoding needs the tokenizer: Baton sends ids, and gets ids.
        needs_tokenizer = effective.value.guided_decoding_backend is not None
        return package.llm(model=str(config.model), skip_tokenizer_init=not needs_tokenizer, **arguments)


def load_encoder(config: TrtllmConfig, effective: ResolvedArgs, package: Package) -> Any:
    """Loads the MultimodalEncoder. Blocks and raises as `load`."""
    given = {key.partition(".")[0] for key in effective.sources} | {"max_batch_size"}
    arguments = {name: getattr(effective.value, name) for name in ENCODER_KNOWN if name in given}
    with loading(f"trtllm {package.version}", config.model):
        return package.encoder(model=str(config.model), **arguments)


def _arguments(config: TrtllmConfig, effective: ResolvedArgs, package: Package) -> dict[str, Any]:
    """Returns the arguments that were set, since versions differ in defaults, and the limits that routers use."""
    arguments = {}
    for name in _named(effective):
        if config.backend == "autodeploy" and name in AUTODEPLOY_UNKNOWN:
            continue
        arguments[name] = _made(getattr(effective.value, name), package)
    return arguments


def _named(effective: ResolvedArgs) -> list[str]:
    given = {key.partition(".")[0] for key in effective.sources}
    return [name for name in type(effective.value).model_fields if name in _ALWAYS | given]


def _made(value: Any, package: Package) -> Any:
    """The value as the engine takes it. Sections are dictionaries, since not all of their classes are exported."""
    if isinstance(value, SpeculativeArguments):
        return _speculative(value, package)
    if not isinstance(value, BaseModel):
        return value
    fields = value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, KvCacheArguments):
        # Both sides of a handoff must agree on it, so it is never left to a version's default.
        fields["tokens_per_block"] = value.tokens_per_block
    return fields


def _speculative(section: SpeculativeArguments, package: Package) -> Any:
    """The key decoding_type selects the class, since 1.3. Version 1.2 does not know the key, and takes an object."""
    kind = getattr(package.llmapi, _SPECULATIVE[section.decoding_type], None)
    if kind is None:
        raise ConfigError(f"trtllm {package.version} has no speculative_config.decoding_type {section.decoding_type}")
    fields = section.model_dump(mode="json", exclude_unset=True)
    if "decoding_type" in kind.model_fields:
        return fields
    return kind(**{name: value for name, value in fields.items() if name != "decoding_type"})
