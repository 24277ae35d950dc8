"""vLLM as it is installed: imported only here, and inspected where versions differ."""

import dataclasses
import importlib
import inspect
import os
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from baton.errors import ConfigError
from services.engines.external.package import PackageSource

_SOURCE = PackageSource(
    "vllm",
    "vLLM",
    "vllm",
    "install it into an environment of its own (docs/vllm.md), or choose engine.kind pytorch",
    Version("0.30.0"),
    Version("0.34.0.dev0"),
    "0.30 to 0.33",
)
_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
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
        """True if this is vLLM's build for CPUs."""
        return bool(_SOURCE.load("platforms").current_platform.is_cpu())

    @property
    def multimodal_inputs(self) -> Any:
        """vLLM's module of processed inputs with images."""
        return _SOURCE.load("multimodal.inputs")


def open_vllm_package() -> VllmPackage:
    """Imports vLLM. Raises a one-line ConfigError if it is missing, cannot run here, or is not supported."""
    if os.environ.get(_MULTIPROCESS):
        raise ConfigError(f"{_MULTIPROCESS} is set; it would turn Baton's own metrics into files: unset it")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    version = _SOURCE.version_of(_SOURCE.load())
    llm = _SOURCE.load("v1.engine.async_llm").AsyncLLM
    arguments, sampling = _SOURCE.load("engine.arg_utils").AsyncEngineArgs, _SOURCE.load("sampling_params")
    errors, config = _SOURCE.load("exceptions"), _SOURCE.load("config")
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
        stat_logger=_SOURCE.load("v1.metrics.loggers").StatLoggerBase,
        lora_request=_SOURCE.load("lora.request").LoRARequest,
        client_error=errors.VLLMClientError,
        overflow_error=errors.GracefulHTTPError,
        dead_error=_SOURCE.load("v1.engine.exceptions").EngineDeadError,
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
