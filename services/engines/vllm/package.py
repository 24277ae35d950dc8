"""vLLM as it is installed: imported only here, and inspected where versions differ."""

import dataclasses
import importlib
import inspect
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from packaging.version import InvalidVersion, Version

from baton.errors import ConfigError

_OLDEST = Version("0.30.0")
_END = Version("0.34.0.dev0")
_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
_HOW = "install it into an environment of its own (docs/vllm.md), or choose engine.kind pytorch"
_MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
# Read when vLLM is imported, by its own processes too. A value that is set in the environment takes precedence.
_ENVIRONMENT = {
    "VLLM_CONFIGURE_LOGGING": "0",  # its lines would go to our standard output
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process with gRPC's threads may hang
}
_METHODS = ("generate", "shutdown", "collective_rpc", "check_health", "is_sleeping", "add_lora", "remove_lora")


@dataclass(frozen=True, slots=True)
class VllmPackage:
    """The parts of the package that the adapter uses, and the arguments that this version accepts."""

    version: Version
    async_llm: Any
    engine_args: Any
    sampling_params: Any
    output_kind: Any
    structured_outputs: Any
    structured_outputs_config: Any
    kv_transfer_config: Any
    kv_events_config: Any
    stat_logger: Any
    lora_request: Any
    client_error: type[Exception]
    overflow_error: type[Exception]
    dead_error: type[Exception]
    connector_version: int
    engine_arguments: frozenset[str]
    sampling_arguments: frozenset[str]
    generate_arguments: frozenset[str]

    @property
    def is_cpu(self) -> bool:
        """Whether this is vLLM's build for CPUs."""
        return bool(_import("vllm.platforms").current_platform.is_cpu())


def open_vllm_package() -> VllmPackage:
    """Imports vLLM. Raises a one-line ConfigError if it is missing, cannot run here, or is not supported."""
    if os.environ.get(_MULTIPROCESS):
        raise ConfigError(f"{_MULTIPROCESS} is set; it would turn Baton's own metrics into files: unset it")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    version = _supported(_import("vllm"))
    llm = _import("vllm.v1.engine.async_llm").AsyncLLM
    arguments, sampling = _import("vllm.engine.arg_utils").AsyncEngineArgs, _import("vllm.sampling_params")
    errors, config = _import("vllm.exceptions"), _import("vllm.config")
    if lacking := [name for name in _METHODS if not hasattr(llm, name)]:
        raise ConfigError(f"vllm {version} lacks AsyncLLM.{', '.join(lacking)}, which Baton needs")
    return VllmPackage(
        version=version,
        async_llm=llm,
        engine_args=arguments,
        sampling_params=sampling.SamplingParams,
        output_kind=sampling.RequestOutputKind,
        structured_outputs=sampling.StructuredOutputsParams,
        structured_outputs_config=config.StructuredOutputsConfig,
        kv_transfer_config=config.KVTransferConfig,
        kv_events_config=config.KVEventsConfig,
        stat_logger=_import("vllm.v1.metrics.loggers").StatLoggerBase,
        lora_request=_import("vllm.lora.request").LoRARequest,
        client_error=errors.VLLMClientError,
        overflow_error=errors.GracefulHTTPError,
        dead_error=_import("vllm.v1.engine.exceptions").EngineDeadError,
        connector_version=_connector_version(),
        engine_arguments=frozenset(field.name for field in dataclasses.fields(arguments)),
        sampling_arguments=frozenset(sampling.SamplingParams.__struct_fields__),
        generate_arguments=frozenset(inspect.signature(llm.generate).parameters),
    )


def _connector_version() -> int:
    """The version that a handshake of two NixlConnectors compares; 0 if this version of vLLM has none."""
    try:
        return int(importlib.import_module(f"{_NIXL}.metadata").NIXL_CONNECTOR_VERSION)
    except (ImportError, AttributeError):
        return 0


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"engine.kind vllm needs vLLM, which cannot be imported ({why}): {_HOW}") from error


def _supported(package: ModuleType) -> Version:
    try:
        version = Version(str(package.__version__))
    except (AttributeError, InvalidVersion) as error:
        raise ConfigError(f"vllm does not say its version: {_HOW}") from error
    if not _OLDEST <= version < _END:
        raise ConfigError(f"vllm {version} is not supported; 0.30 to 0.33 are")
    return version
