"""Opens the engine: imports vLLM and checks the arguments before anything is loaded."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager

from baton.errors import ConfigError
from runtime.machine import visible_gpus
from services.engines.base import Encoder, Engine
from services.engines.context import EngineContext
from services.engines.external.argument_places import resolve
from services.engines.pytorch.vision.encoder import PyTorchEncoder
from services.engines.vllm.config import VllmArguments, VllmConfig
from services.engines.vllm.engine import VllmEngine
from services.engines.vllm.loading import RANKS, ResolvedVllm, encoder_config
from services.engines.vllm.package import open_vllm_package


def open_vllm(config: VllmConfig, context: EngineContext) -> AbstractAsyncContextManager[Engine]:
    """Returns the engine for these roles; entering it loads it. Raises ConfigError without vLLM, or for a wrong
    setting.
    """
    effective = resolve(config)
    check(config, effective, context.roles, context.lease_seconds)
    package = open_vllm_package()
    if not package.is_cpu:
        check_gpus(effective.value, len(visible_gpus()))
        check_adapters(config, effective.value)
    return VllmEngine(config, effective, package, context.roles)


def open_vllm_encoder(config: VllmConfig) -> AbstractAsyncContextManager[Encoder]:
    """Returns the encoder of a checkpoint's images, which is the embedded engine's: vLLM reads its embeddings."""
    return PyTorchEncoder(encoder_config(config, resolve(config).value))


def check_gpus(args: VllmArguments, gpus: int) -> None:
    """Raises ConfigError with both numbers if more GPUs are needed than this process sees."""
    needed = args.tensor_parallel_size * args.pipeline_parallel_size * args.data_parallel_size
    if 0 < gpus < needed:  # none: another vendor's, which vLLM counts itself
        raise ConfigError(f"vllm: tensor x pipeline x data parallel size is {needed}, and {gpus} GPUs are visible")


def check_adapters(config: VllmConfig, args: VllmArguments) -> None:
    """Raises ConfigError for adapters in float32, which end vLLM's process on GPUs: its kernels assert 16 bits."""
    if config.lora is not None and args.dtype == "float32":
        raise ConfigError(
            "vllm: engine.lora: vLLM computes adapters in 16 bits only on GPUs, and args.dtype is float32"
        )


def check(config: VllmConfig, effective: ResolvedVllm, roles: Sequence[str], lease_seconds: float) -> None:
    """Raises ConfigError that lists every fault, in one line."""
    if faults := [*_faults(config, effective.value, roles, lease_seconds)]:
        raise ConfigError(f"vllm: {'; '.join(faults)}")


def _faults(config: VllmConfig, args: VllmArguments, roles: Sequence[str], lease_seconds: float) -> Iterator[str]:
    if "prefill" in roles and config.whole_requests:
        yield "engine.whole_requests: the role prefill hands KV over"
    if config.sleep_after_seconds is not None and not config.whole_requests:
        yield "engine.sleep_after_seconds: only with engine.whole_requests: NIXL keeps the addresses of the pool"
    if config.sleep_after_seconds is not None and config.lora is not None:
        yield "engine.sleep_after_seconds: not with engine.lora, which was not run"
    if config.handoff.seconds <= lease_seconds:
        yield f"engine.handoff.seconds: {config.handoff.seconds} must be over handoff.lease_seconds, {lease_seconds}"
    if config.guided_decoding and not (config.model / "tokenizer.json").is_file():
        yield f"engine.guided_decoding: {config.model} has no tokenizer.json"
    if config.guided_decoding and args.speculative_config is not None:
        yield "engine.guided_decoding: not with speculative_config, since the two have not been run together"
    if config.lora is not None and config.lora.max_rank > RANKS[-1]:
        yield f"engine.lora.max_rank: {config.lora.max_rank} is over vLLM's largest, {RANKS[-1]}"
    if config.lora is not None and args.speculative_config is not None:
        yield "engine.lora: not with speculative_config, since the two have not been run together"
    if args.speculative_config is not None and not config.whole_requests:
        yield "speculative_config: only with engine.whole_requests, since it has not been run with handoffs"
    if args.pipeline_parallel_size > 1 and not config.whole_requests:
        yield "pipeline_parallel_size: over 1 only with engine.whole_requests: vLLM's NixlConnector reads no stages"
    if config.tiers is not None and not args.enable_prefix_caching:
        yield "engine.tiers: needs enable_prefix_caching: blocks are found in host memory by their hashes"
