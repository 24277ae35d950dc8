"""TensorRT-LLM's own objects, made from the arguments in effect."""

import asyncio
from collections.abc import Callable
from typing import Any

import structlog
from pydantic import BaseModel

from rpc.errors import ConfigError, EngineFailed
from services.engines.trtllm.arguments import AUTODEPLOY_UNKNOWN, ENCODER_KNOWN
from services.engines.trtllm.config import TrtllmConfig
from services.engines.trtllm.detached import detached
from services.engines.trtllm.effective import Effective
from services.engines.trtllm.package import Package

log = structlog.get_logger(__name__)

_SHUTDOWN_SECONDS = 20.0
_SECTIONS = {
    "kv_cache_config": "KvCacheConfig",
    "scheduler_config": "SchedulerConfig",
    "cache_transceiver_config": "CacheTransceiverConfig",
    "cuda_graph_config": "CudaGraphConfig",
    "lora_config": "LoraConfig",
}


_ALWAYS = {
    "max_batch_size",
    "max_num_tokens",
    "enable_chunked_prefill",
    "kv_cache_config",
    "return_perf_metrics",
    "enable_iter_perf_stats",
}


def load(config: TrtllmConfig, effective: Effective, package: Package) -> Any:
    """The LLM, loaded. Blocking, for minutes. Raises ConfigError that names the version for what it does not accept."""

    def make() -> Any:
        arguments = _arguments(config, effective, package)
        return package.llm(model=str(config.model), skip_tokenizer_init=True, **arguments)

    return _loaded(config, package, make)


def load_encoder(config: TrtllmConfig, effective: Effective, package: Package) -> Any:
    """The MultimodalEncoder, loaded. As `load`."""
    given = {key.partition(".")[0] for key in effective.sources} | {"max_batch_size"}
    arguments = {name: getattr(effective.value, name) for name in ENCODER_KNOWN if name in given}
    return _loaded(config, package, lambda: package.encoder(model=str(config.model), **arguments))


async def shut_down(engine: Any) -> None:
    """Ends what was loaded; one that hangs is left to the end of the process."""
    ending = detached(engine.shutdown, "trtllm-shutdown")
    _, late = await asyncio.wait([ending], timeout=_SHUTDOWN_SECONDS)
    if late:
        log.error("trtllm does not shut down", seconds=_SHUTDOWN_SECONDS)
    else:
        ending.result()


def _loaded(config: TrtllmConfig, package: Package, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"trtllm {package.version} does not accept the arguments: {_line(error)}") from error
    except (RuntimeError, OSError) as error:
        raise EngineFailed(f"trtllm {package.version} cannot load {config.model}: {_line(error)}") from error


def _arguments(config: TrtllmConfig, effective: Effective, package: Package) -> dict[str, Any]:
    """Only what was set: each version keeps its own defaults, except for the limits that we promise to routers."""
    arguments = {}
    for name in _named(effective):
        if config.backend == "autodeploy" and name in AUTODEPLOY_UNKNOWN:
            continue
        arguments[name] = _made(name, getattr(effective.value, name), package)
    return arguments


def _named(effective: Effective) -> list[str]:
    given = {key.partition(".")[0] for key in effective.sources}
    return [name for name in type(effective.value).model_fields if name in _ALWAYS | given]


def _made(name: str, value: Any, package: Package) -> Any:
    if not isinstance(value, BaseModel):
        return value
    # What decides whether two sides fit together is said, and not left to a version's default.
    always = {"tokens_per_block": value.tokens_per_block} if name == "kv_cache_config" else {}  # type: ignore[attr-defined]
    fields = {**value.model_dump(mode="json", exclude_unset=True), **always}
    return getattr(package.llmapi, _SECTIONS[name])(**fields) if name in _SECTIONS else fields


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
