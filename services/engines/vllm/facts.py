"""Facts of the engine's model, from the checkpoint and the arguments in effect."""

from pathlib import Path
from typing import Any

from services.engines.base import ModelFacts
from services.engines.external.package import kv_dtype, kv_layout, read_model
from services.engines.kv import KvLayout
from services.engines.pytorch.model.checkpoint import end_ids, fingerprint, model_files, read_json
from services.engines.vllm.config import VllmArguments, VllmConfig
from services.engines.vllm.package import VllmPackage
from services.engines.vllm.requests.sampling import unsupported_options


def vllm_facts(config: VllmConfig, args: VllmArguments, package: VllmPackage, *, takes_handoffs: bool) -> ModelFacts:
    """The facts except for the time of loading. Raises ConfigError for a folder that is not a checkpoint."""
    _, model = read_model(config.model)
    return ModelFacts(
        name=config.name or config.model.name,
        engine="vllm",
        max_context_tokens=args.max_model_len or int(model["max_position_embeddings"]),
        vocab_size=int(model["vocab_size"]),
        # Drafted tokens get no log probabilities that could be compared.
        max_logprobs=0 if args.speculative_config else args.max_logprobs,
        eos_token_ids=end_ids(config.model, model),
        layout=_layout(config.model, model, args, package),
        files=model_files(config.model),
        prompt_logprobs=args.speculative_config is None and "prompt_logprobs" in package.sampling_arguments,
        guided_decoding=config.guided_decoding,
        lora=config.lora is not None,
        takes_handoffs=takes_handoffs,
        unsupported_sampling=unsupported_options(package),
        data_parallel_ranks=args.data_parallel_size,
        settings=(
            ("gpu_memory_utilization", f"{args.gpu_memory_utilization:g}"),
            ("max_num_batched_tokens", str(args.max_num_batched_tokens)),
            ("max_num_seqs", str(args.max_num_seqs)),
            ("trust_remote_code", str(args.trust_remote_code).lower()),
        ),
    )


def has_vision(folder: Path) -> bool:
    """True if the checkpoint has a vision encoder. Raises ConfigError for a folder that is not a checkpoint."""
    return "vision_config" in read_json(folder / "config.json")


def _layout(folder: Path, model: dict[str, Any], args: VllmArguments, package: VllmPackage) -> KvLayout:
    """A handshake compares versions, too."""
    identity = {
        "vllm": str(package.version),
        "connector": package.connector_version,
        "weights": fingerprint(folder),
        "quantization": args.quantization,
    }
    return kv_layout(identity, model, kv_dtype(args.kv_cache_dtype, args.dtype, model), args.block_size)
