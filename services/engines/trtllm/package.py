"""TensorRT-LLM as it is installed: imported only here, and inspected where versions differ."""

import contextlib
import dataclasses
import importlib
import inspect
import os
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from packaging.version import Version

from baton.errors import ConfigError
from services.engines.external.package import PackageSource

NAME = "tensorrt_llm"
_PROCESSES = 64
# Our log levels in TensorRT-LLM's words. A level set in the environment takes precedence.
_LOG_LEVELS = {"debug": "DEBUG", "info": "INFO", "warning": "WARNING", "error": "ERROR"}
_SOURCE = PackageSource(
    "trtllm",
    "TensorRT-LLM",
    NAME,
    "it runs on Linux with NVIDIA GPUs, CUDA 13 and MPI; install it from NVIDIA's package index "
    "(docs/tensorrt-llm.md), or choose engine.kind pytorch",
    Version("1.2.0"),
    Version("1.4.0.dev0"),
    "1.2 and 1.3",
)


@dataclass(frozen=True, slots=True)
class Package:
    """The parts of the package that the adapter uses, and the arguments that this version accepts."""

    version: Version
    llm: Any
    sampling_params: Any
    disaggregated_params: Any
    logprob: Any
    request_error: type[Exception]
    llmapi: ModuleType
    handoff_fields: frozenset[str]
    sampling_arguments: frozenset[str]
    generate_arguments: frozenset[str]

    @property
    def encoder(self) -> Any:
        """`MultimodalEncoder`."""
        return _SOURCE.load("llmapi.mm_encoder").MultimodalEncoder

    @property
    def metrics_collector(self) -> Any:
        """`MetricsCollector`, or None if it is not installed: it needs more packages than the engine."""
        try:
            return importlib.import_module(f"{NAME}.metrics").MetricsCollector
        except ImportError:
            return None

    def on_rank(self, rank: int) -> Any:
        """SchedulingParams that pin a request to one attention-DP rank."""
        params = _SOURCE.load("scheduling_params").SchedulingParams
        return params(attention_dp_rank=rank, attention_dp_relax=False)

    def shared_tensor(self) -> Any:
        """`SharedTensorContainer`, which makes and reads handles on embeddings."""
        return _SOURCE.load("_torch.shared_tensor").SharedTensorContainer

    def new_handoff_id(self, node: int) -> int:
        """A handoff id that is unique across nodes. The arguments of its generator differ between versions."""
        make = _SOURCE.load("llmapi.disagg_utils").get_global_disagg_request_id
        names = set(inspect.signature(make).parameters)
        if {"node_id", "process_id"} <= names:
            return int(make(**dict(zip(("node_id", "process_id"), divmod(node, _PROCESSES), strict=True))))
        if "machine_id" in names:
            return int(make(machine_id=node))
        raise ConfigError(
            f"trtllm {self.version}: get_global_disagg_request_id takes {sorted(names)}, which is not known"
        )


def open_package(backend: str = "pytorch", log_level: str = "info") -> Package:
    """Imports the package. Raises a one-line ConfigError if it is missing, cannot run here, or is not supported."""
    # Read at import. Usage statistics are on by default.
    os.environ.setdefault("TRTLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("TLLM_LOG_LEVEL", _LOG_LEVELS[log_level])
    with contextlib.redirect_stdout(sys.stderr):
        package = _SOURCE.load()
        version = _SOURCE.version_of(package)
        llmapi = _SOURCE.load("llmapi")
        llm = _SOURCE.load("_torch.auto_deploy").LLM if backend == "autodeploy" else package.LLM
        params = llmapi.DisaggregatedParams
        return Package(
            version=version,
            llm=llm,
            sampling_params=package.SamplingParams,
            disaggregated_params=params,
            logprob=_SOURCE.load("executor.result").Logprob,
            request_error=_SOURCE.load("executor.utils").RequestError,
            llmapi=llmapi,
            handoff_fields=frozenset(field.name for field in dataclasses.fields(params)),
            sampling_arguments=frozenset(inspect.signature(package.SamplingParams).parameters),
            generate_arguments=frozenset(inspect.signature(llm.generate_async).parameters),
        )


def visible_gpus() -> int:
    """The number of GPUs in CUDA_VISIBLE_DEVICES, or of all GPUs if it is unset."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return len([name for name in named.split(",") if name.strip() not in ("", "-1")])
    import torch

    return torch.cuda.device_count()
