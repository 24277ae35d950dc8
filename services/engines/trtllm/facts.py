"""What the engine says of its model: read from the checkpoint's folder and the arguments in effect."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rpc.errors import ConfigError
from services.engine import ModelFacts
from services.engines.pytorch.checkpoint import fingerprint, model_files
from services.engines.trtllm.arguments import EngineArguments
from services.engines.trtllm.config import TrtllmConfig
from services.engines.trtllm.images import image_rules, require_images
from services.engines.trtllm.package import Package
from services.kv import KvLayout

_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}


def model_facts(config: TrtllmConfig, args: EngineArguments, package: Package) -> ModelFacts:
    """Without the time that loading took. Raises ConfigError for a folder that is no checkpoint."""
    whole = _read(config.model / "config.json")
    model = {**whole, **whole.get("text_config", {})}
    return ModelFacts(
        name=config.name or config.model.name,
        engine="trtllm",
        max_context_tokens=args.max_seq_len or int(model["max_position_embeddings"]),
        vocab_size=int(model["vocab_size"]),
        max_logprobs=config.max_logprobs,
        eos_token_ids=_ends(config.model, model),
        layout=_layout(config.model, model, args, package),
        files=model_files(config.model),
        load_seconds=0.0,
        # AutoDeploy encodes by itself, and reads no embeddings.
        images=image_rules(config.model, whole) if config.backend == "pytorch" else None,
        data_parallel_ranks=args.attention_dp_size if config.backend == "pytorch" else 1,
    )


def encoder_facts(config: TrtllmConfig, args: EngineArguments, package: Package) -> ModelFacts:
    """The same of an encoder: its layout is that of embeddings, which it names by version and weights."""
    facts = model_facts(config, args, package)
    rules = require_images(config.model, _read(config.model / "config.json"))
    text = f"trtllm {package.version} {args.dtype} {fingerprint(config.model)}"
    images = replace(rules, encoder_fingerprint=hashlib.sha256(text.encode()).hexdigest())
    return replace(facts, layout=images.embedding_layout, images=images, data_parallel_ranks=1)


def _layout(folder: Path, model: dict[str, Any], args: EngineArguments, package: Package) -> KvLayout:
    """All that two sides of a handoff must have in common is in its digest; the numbers are for people."""
    kv, heads = args.kv_cache_config, int(model["num_attention_heads"])
    dtype = str(model.get("torch_dtype") or model.get("dtype") or "bfloat16") if kv.dtype == "auto" else kv.dtype
    kv_heads = int(model.get("num_key_value_heads") or heads)
    head_dim = int(model.get("head_dim") or int(model["hidden_size"]) // heads)
    layers = int(model["num_hidden_layers"])
    return KvLayout(
        model=_fingerprint(folder, args, package),
        dtype=dtype,
        num_layers=layers,
        kv_factor=2,
        kv_heads=kv_heads,
        block_tokens=kv.tokens_per_block,
        head_dim=head_dim,
        block_bytes=layers * 2 * kv_heads * kv.tokens_per_block * head_dim * _WIDTHS.get(dtype, 2),
    )


def _fingerprint(folder: Path, args: EngineArguments, package: Package) -> str:
    transceiver, speculative = args.cache_transceiver_config, args.speculative_config
    parts = {
        "trtllm": str(package.version),
        "weights": fingerprint(folder),
        "transceiver": transceiver.backend if transceiver else None,
        "runtime": transceiver.transceiver_runtime if transceiver else None,
        "speculative": speculative.model_dump(mode="json") if speculative else None,
        "lora": args.enable_lora,
    }
    return json.dumps(parts, sort_keys=True)


def _ends(folder: Path, model: dict[str, Any]) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    found = (_read(path) if path.is_file() else {}).get("eos_token_id", model.get("eos_token_id"))
    ends = tuple(found) if isinstance(found, list) else (found,)
    if None in ends or not ends:
        raise ConfigError(f"{folder}: names no eos_token_id, which the engine needs where it has no tokenizer")
    return tuple(int(each) for each in ends)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected keys and values")
    return content
