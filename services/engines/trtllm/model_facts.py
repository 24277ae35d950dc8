"""Facts of the engine's model and the form of images in its prompts, from the checkpoint and the arguments."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from services.engines.base import ModelFacts
from services.engines.external.package import kv_layout, read_model
from services.engines.kv import KvLayout, embedding_layout
from services.engines.pytorch.model.checkpoint import end_ids, fingerprint, model_files, read_json
from services.engines.rules import ImageRules
from services.engines.trtllm.config import EngineArguments, TrtllmConfig
from services.engines.trtllm.package import Package
from services.engines.trtllm.requests.request_builder import unsupported

# TensorRT-LLM has no standalone encoder for these.
_WITHOUT_ENCODER = ("Llama4ForConditionalGeneration",)
_DTYPES = ("float32", "float16", "bfloat16")


def image_rules(folder: Path, model: dict[str, Any]) -> ImageRules | None:
    """The form of images in prompts; None for a model without images or one whose images cannot be served."""
    if "vision_config" not in model or problem(model):
        return None
    token_id = int(model.get("image_token_id", model.get("image_token_index", -1)))
    hidden_size = int({**model, **model.get("text_config", {})}["hidden_size"])
    return ImageRules(
        placeholder=_token(folder, token_id),
        placeholder_token_id=token_id,
        tokens_per_image=0,
        hidden_size=hidden_size,
        embedding_layout=embedding_layout(fingerprint(folder), embedding_dtype(model), hidden_size),
    )


def require_images(folder: Path, model: dict[str, Any]) -> ImageRules:
    """The rules of `image_rules`. Raises ConfigError with the reason if there are none."""
    rules = image_rules(folder, model)
    if rules is None:
        raise ConfigError(f"roles: {folder} has no encode role: {problem(model) or 'it does not accept images'}")
    return rules


def problem(model: dict[str, Any]) -> str:
    """The reason that a model's images cannot be served; empty if they can."""
    for architecture in model.get("architectures") or ():
        if architecture in _WITHOUT_ENCODER:
            return f"{architecture} has no encoder that runs alone"
    text = {**model, **model.get("text_config", {})}
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if "mrope_section" in rope or "mrope" in (rope.get("type"), rope.get("rope_type")):
        return "its positions have several dimensions (mRoPE), which embeddings do not carry"
    if "image_token_id" not in model and "image_token_index" not in model:
        return "its configuration names no image_token_id"
    return ""


def embedding_dtype(model: dict[str, Any]) -> str:
    """The dtype of the rows of embeddings."""
    text = {**model, **model.get("text_config", {})}
    named = str(text.get("torch_dtype") or text.get("dtype") or "bfloat16")
    return named if named in _DTYPES else "bfloat16"


def _token(folder: Path, token_id: int) -> str:
    """The text of an added token; empty if the folder has no tokenizer."""
    path = folder / "tokenizer.json"
    added = json.loads(path.read_bytes()).get("added_tokens", []) if path.is_file() else []
    return next((str(token["content"]) for token in added if token["id"] == token_id), "")


def model_facts(config: TrtllmConfig, args: EngineArguments, package: Package) -> ModelFacts:
    """The facts except for the time of loading. Raises ConfigError for a folder that is not a checkpoint."""
    whole, model = read_model(config.model)
    return ModelFacts(
        name=config.name or config.model.name,
        engine="trtllm",
        max_context_tokens=args.max_seq_len or int(model["max_position_embeddings"]),
        vocab_size=int(model["vocab_size"]),
        # Speculative decoding returns no log probabilities.
        max_logprobs=0 if args.speculative_config else config.max_logprobs,
        eos_token_ids=_required_ends(config.model, model),
        layout=_layout(config.model, model, args, package),
        files=model_files(config.model),
        load_seconds=0.0,
        # AutoDeploy encodes by itself, and reads no embeddings.
        images=image_rules(config.model, whole) if config.backend == "pytorch" else None,
        takes_handoffs=args.can_hand_over,
        guided_decoding=args.guided_decoding_backend is not None and "guided_decoding" in package.sampling_arguments,
        unsupported_sampling=unsupported(package),
        data_parallel_ranks=args.attention_dp_size if config.backend == "pytorch" else 1,
        settings=_settings(args),
    )


def _settings(args: EngineArguments) -> tuple[tuple[str, str], ...]:
    return (
        ("free_gpu_memory_fraction", f"{args.kv_cache_config.free_gpu_memory_fraction:g}"),
        ("max_batch_size", str(args.max_batch_size)),
        ("max_beam_width", str(args.max_beam_width)),
        ("max_num_tokens", str(args.max_num_tokens)),
        ("trust_remote_code", str(args.trust_remote_code).lower()),
    )


def encoder_facts(config: TrtllmConfig, args: EngineArguments, package: Package) -> ModelFacts:
    """The facts of an encoder. Its layout is that of embeddings, with its version and weights in the fingerprint."""
    facts = model_facts(config, args, package)
    rules = require_images(config.model, read_json(config.model / "config.json"))
    text = f"trtllm {package.version} {args.dtype} {fingerprint(config.model)}"
    images = replace(rules, encoder_fingerprint=hashlib.sha256(text.encode()).hexdigest())
    return replace(facts, layout=images.embedding_layout, images=images, data_parallel_ranks=1, takes_handoffs=True)


def _layout(folder: Path, model: dict[str, Any], args: EngineArguments, package: Package) -> KvLayout:
    """The numbers are informative: both sides must share the identity."""
    kv, transceiver, speculative = args.kv_cache_config, args.cache_transceiver_config, args.speculative_config
    identity = {
        "trtllm": str(package.version),
        "weights": fingerprint(folder),
        "transceiver": transceiver.backend if transceiver else None,
        "runtime": transceiver.transceiver_runtime if transceiver else None,
        "speculative": speculative.model_dump(mode="json") if speculative else None,
        "lora": args.enable_lora,
    }
    dtype = str(model.get("torch_dtype") or model.get("dtype") or "bfloat16") if kv.dtype == "auto" else kv.dtype
    return kv_layout(identity, model, dtype, kv.tokens_per_block)


def _required_ends(folder: Path, model: dict[str, Any]) -> tuple[int, ...]:
    ends = end_ids(folder, model)
    if not ends:
        raise ConfigError(f"{folder}: names no eos_token_id, which the engine needs where it has no tokenizer")
    return ends
