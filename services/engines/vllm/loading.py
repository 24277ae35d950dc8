"""Starts AsyncLLM with the arguments in effect. The facts of its model, from the checkpoint and these arguments."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from services.engines.base import ModelFacts
from services.engines.external.argument_places import MergedArguments
from services.engines.external.event_reader import EventEndpoints
from services.engines.external.package import kv_dtype, kv_layout, loading, read_model
from services.engines.external.surroundings import EnvironmentVariables, free_ports
from services.engines.kv import KvLayout
from services.engines.lora.options import LoraOptions
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.model.checkpoint import end_ids, fingerprint, model_files, read_json
from services.engines.pytorch.model.loading import choose_device, choose_dtype, name_of, read_config
from services.engines.pytorch.vision.images import FAMILIES, TOWERS
from services.engines.pytorch.vision.images import image_rules as encoded_image_rules
from services.engines.rules import ImageRules
from services.engines.vllm.config import VllmArguments, VllmConfig
from services.engines.vllm.package import VllmPackage
from services.engines.vllm.requests.sampling import BACKEND, unsupported_options

ResolvedVllm = MergedArguments[VllmArguments]

_EXTENSION = "services.engines.vllm.inside.worker.BatonWorker"
# Set even where they are defaults: routers and the other side of a handoff count on them.
_ALWAYS = {"max_num_seqs", "max_num_batched_tokens", "block_size", "enable_prefix_caching", "max_logprobs", "seed"}
# The ranks that vLLM reserves memory for.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# vLLM reads a part of its settings from the environment, which two engines of one process share.
_STARTING = threading.Lock()


@dataclass(frozen=True, slots=True)
class EngineStart:
    """The inputs of an engine's start, beside the arguments in effect."""

    roles: Sequence[str]
    context_tokens: int
    events: EventEndpoints | None
    takes_images: bool
    statistics: Callable[[int, Any], None]


def can_hand_over(config: VllmConfig, roles: Sequence[str]) -> bool:
    """True if KV can leave or enter an engine of these roles."""
    return "prefill" in roles or not config.whole_requests


def start(config: VllmConfig, effective: ResolvedVllm, package: VllmPackage, starting: EngineStart) -> Any:
    """Starts AsyncLLM, which blocks for a minute or more. Raises ConfigError for arguments that vLLM refuses."""
    arguments = _arguments(config, effective, package, starting)
    if unknown := sorted(set(arguments) - package.engine_arguments):
        raise ConfigError(f"vllm {package.version} does not know {', '.join(unknown)}")
    with _STARTING, ExitStack() as stack:
        stack.enter_context(EnvironmentVariables(_variables(config, effective.value, package)))
        stack.enter_context(loading(f"vllm {package.version}", config.model))
        made = package.engine_args(**arguments)
        return package.async_llm.from_engine_args(made, stat_loggers=[_logger(package, starting.statistics)])


def _arguments(
    config: VllmConfig, effective: ResolvedVllm, package: VllmPackage, starting: EngineStart
) -> dict[str, Any]:
    given = {key.partition(".")[0] for key in effective.sources}
    dumped = effective.value.model_dump(mode="json", exclude_none=True)
    arguments = {name: value for name, value in dumped.items() if name in _ALWAYS | given}
    arguments |= {"model": str(config.model), "enable_log_requests": False}
    # vLLM does not even load the language part of a checkpoint with a vision encoder without its tokenizer.
    arguments["skip_tokenizer_init"] = not (config.guided_decoding or has_vision(config.model))
    if config.guided_decoding:
        arguments["structured_outputs_config"] = package.structured_outputs_config(backend=BACKEND)
    if config.sleep_after_seconds is not None:
        arguments["enable_sleep_mode"] = True
    if starting.takes_images:
        # Of embeddings alone: vLLM loads no vision encoder, and keeps no copies in its processor's cache.
        arguments |= {"enable_mm_embeds": True, "limit_mm_per_prompt": {"image": 0}, "mm_processor_cache_gb": 0}
    if config.lora is not None:
        arguments |= _lora_arguments(config.lora, package)
    if package.is_cpu:
        arguments |= _whole_prompts(effective.value, package, starting.context_tokens)
    if package.is_cpu and not given & {"kv_cache_memory_bytes", "gpu_memory_utilization"}:
        # By default it is a share of all memory, and vLLM does not start if less is free.
        arguments["kv_cache_memory_bytes"] = config.cpu_kv_cache_gib << 30
    if connectors := kv_connectors(config, starting.roles, is_cpu=package.is_cpu):
        arguments["kv_transfer_config"] = package.kv_transfer_config(**together(connectors))
        arguments["worker_extension_cls"] = _EXTENSION
    if starting.events is not None:
        arguments["kv_events_config"] = package.kv_events_config(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=starting.events.events,
            replay_endpoint=starting.events.replay,
            buffer_steps=config.kv_event_steps,
        )
    return arguments


def _lora_arguments(options: LoraOptions, package: VllmPackage) -> dict[str, Any]:
    """On CPUs there is one place more, the last, which stays empty: vLLM's operations there give tokens without an
    adapter the index -1, and so the last place's adapter, in each batch that has another token with one.
    """
    rank = next(each for each in RANKS if each >= options.max_rank)
    places = options.max_loaded + 1 if package.is_cpu else options.max_loaded
    return {"enable_lora": True, "max_loras": places, "max_cpu_loras": places, "max_lora_rank": rank}


def _whole_prompts(args: VllmArguments, package: VllmPackage, context_tokens: int) -> dict[str, Any]:
    """Arguments with which no prompt is computed in parts: a part of a prompt with a seed ends vLLM's process there. It
    moves the offset of a random generator back, which only those of GPUs have.
    """
    if args.enable_chunked_prefill:
        raise ConfigError(f"vllm {package.version}: enable_chunked_prefill: seeded requests end vLLM's process on CPUs")
    return {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(args.max_num_batched_tokens, context_tokens),
    }


def kv_connectors(config: VllmConfig, roles: Sequence[str], *, is_cpu: bool) -> list[dict[str, Any]]:
    """The arguments of vLLM's KVTransferConfig, of each connector. vLLM asks them in order for what a prompt lacks."""
    # If a load fails the request does, and Baton computes its prompt again.
    common = {"kv_load_failure_policy": "fail"}
    connectors: list[dict[str, Any]] = []
    if can_hand_over(config, roles):
        connectors.append(_nixl(config, roles, is_cpu=is_cpu) | common)
    if config.tiers is not None:
        # Without token ids, which only these events have, a stored block has no place in a chain.
        extra = {"cpu_bytes_to_use": int(config.tiers.host_bytes), "self_describing_kv_events": config.kv_events}
        offloading = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        connectors.append(offloading | common)
    return connectors


def _nixl(config: VllmConfig, roles: Sequence[str], *, is_cpu: bool) -> dict[str, Any]:
    role = "kv_both" if len(roles) > 1 else {"prefill": "kv_producer"}.get(roles[0], "kv_consumer")
    threads = 0 if config.handoff.threads is None and is_cpu else config.handoff.threads
    extra = {"kv_lease_duration": config.handoff.seconds, **({} if threads is None else {"num_threads": threads})}
    return {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_buffer_device": config.handoff.buffer_device or ("cpu" if is_cpu else "cuda"),
        "kv_connector_extra_config": extra,
    }


def together(connectors: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One connector, or the one that runs several."""
    if len(connectors) == 1:
        return connectors[0]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"connectors": connectors},
    }


def _variables(config: VllmConfig, args: VllmArguments, package: VllmPackage) -> dict[str, str]:
    handoff = config.handoff
    port = handoff.port or free_ports(handoff.host, args.data_parallel_size)
    variables = {"VLLM_NIXL_SIDE_CHANNEL_HOST": handoff.host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
    if handoff.ucx_tls:
        variables["UCX_TLS"] = handoff.ucx_tls
    if handoff.ucx_net_devices:
        variables["UCX_NET_DEVICES"] = handoff.ucx_net_devices
    if package.is_cpu:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = config.cpu_threads_bind
        # Otherwise the first request with log probabilities waits half a minute for a compiler.
        variables["TORCH_COMPILE_DISABLE"] = "1"
    return variables


def _logger(package: VllmPackage, statistics: Callable[[int, Any], None]) -> Any:
    """Returns a class of vLLM's loggers that passes the statistics of each step on."""

    class StepStatistics(package.stat_logger):  # type: ignore[misc, name-defined]
        def __init__(self, vllm_config: Any, engine_index: int = 0, **_: Any) -> None:
            del vllm_config
            self._rank = engine_index

        def record(self, scheduler_stats: Any = None, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                statistics(self._rank, scheduler_stats)

        def log_engine_initialized(self) -> None:
            """Nothing to say."""

        def __getattr__(self, name: str) -> Any:
            # Versions add methods to the base class, which it need not define.
            if name.startswith(("log", "record")):
                return lambda *_, **__: None
            raise AttributeError(name)

    return StepStatistics


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
        images=image_rules(config, args),
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


def image_rules(config: VllmConfig, args: VllmArguments) -> ImageRules | None:
    """The rules of images that Baton's encoder encodes; None if it does not, or if that was not run with an option."""
    model = read_json(config.model / "config.json")
    tower = model.get("vision_config", {}).get("model_type")
    if model.get("model_type") not in FAMILIES or tower not in TOWERS:
        return None
    if config.lora is not None or args.speculative_config is not None:
        return None
    encoder = encoder_config(config, args)
    read = read_config(config.model)
    return encoded_image_rules(read, config.model, name_of(choose_dtype(encoder, choose_device(encoder), read)))


def encoder_config(config: VllmConfig, args: VllmArguments) -> PyTorchConfig:
    """The settings of the embedded engine's encoder beside this engine. It computes in no float16."""
    dtype = args.dtype if args.dtype in ("auto", "float32") else "bfloat16"
    settings = {"model": config.model, "name": config.name, "dtype": dtype, "max_waiting": config.max_waiting}
    return PyTorchConfig.model_validate({**settings, "canary_seconds": config.canary_seconds})


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
