"""Facts of the engine's model, from the checkpoint and the arguments in effect."""

from typing import Any

from services.engines.base import ModelFacts
from services.engines.external.package import kv_dtype, kv_layout, read_model
from services.engines.kv import KvLayout
from services.engines.pytorch.model.checkpoint import end_ids, fingerprint, model_files
from services.engines.sglang.config import SglangArguments, SglangConfig
from services.engines.sglang.package import SglangPackage
from services.engines.sglang.sampling import unsupported_options


def sglang_facts(config: SglangConfig, args: SglangArguments, package: SglangPackage) -> ModelFacts:
    """The facts except for the time of loading. Raises ConfigError for a folder that is not a checkpoint."""
    _, model = read_model(config.model)
    return ModelFacts(
        name=config.name or config.model.name,
        engine="sglang",
        max_context_tokens=args.context_length or int(model["max_position_embeddings"]),
        vocab_size=int(model["vocab_size"]),
        max_logprobs=config.max_logprobs,
        eos_token_ids=end_ids(config.model, model),
        layout=_layout(config, model, args, package),
        files=model_files(config.model),
        takes_handoffs=not config.whole_requests,
        unsupported_sampling=unsupported_options(args),
        settings=(
            ("chunked_prefill_size", str(args.chunked_prefill_size)),
            ("enable_deterministic_inference", str(args.enable_deterministic_inference).lower()),
            ("max_running_requests", str(args.max_running_requests)),
            ("trust_remote_code", str(args.trust_remote_code).lower()),
        ),
    )


def _layout(config: SglangConfig, model: dict[str, Any], args: SglangArguments, package: SglangPackage) -> KvLayout:
    identity = {
        "sglang": str(package.version),
        "weights": fingerprint(config.model),
        "quantization": args.quantization,
        "tp": args.tp_size,
    }
    return kv_layout(identity, model, kv_dtype(args.kv_cache_dtype, args.dtype, model), args.page_size)
