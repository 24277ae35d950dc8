"""TensorRT-LLM as it is installed here: imported in this file alone, and looked at where versions differ."""

import contextlib
import dataclasses
import importlib
import inspect
import os
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from packaging.version import InvalidVersion, Version

from rpc.errors import ConfigError

NAME = "tensorrt_llm"
_OLDEST = Version("1.2.0")
_GAP = (Version("1.3.0.dev0"), Version("1.3.0rc22"))
_END = Version("1.5.0.dev0")
_PROCESSES = 64
# Ours by TensorRT-LLM's; one that is set in the environment is stronger.
_LOG_LEVELS = {"debug": "DEBUG", "info": "INFO", "warning": "WARNING", "error": "ERROR"}
_HOW = (
    "it runs on Linux with NVIDIA GPUs, CUDA 13 and MPI; install it from NVIDIA's package index "
    "(docs/tensorrt-llm.md), or choose engine.kind pytorch"
)


@dataclass(frozen=True, slots=True)
class Package:
    """The parts that the adapter uses, and what this version's calls accept."""

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
        return _import(f"{NAME}.llmapi.mm_encoder").MultimodalEncoder

    @property
    def metrics_collector(self) -> Any:
        """`MetricsCollector`, or None where it is not installed: it needs more packages than the engine."""
        try:
            return importlib.import_module(f"{NAME}.metrics").MetricsCollector
        except ImportError:
            return None

    def on_rank(self, rank: int) -> Any:
        """SchedulingParams for one attention-DP rank, and no other one."""
        params = _import(f"{NAME}.scheduling_params").SchedulingParams
        return params(attention_dp_rank=rank, attention_dp_relax=False)

    def shared_tensor(self) -> Any:
        """`SharedTensorContainer`, by which embeddings come and go."""
        return _import(f"{NAME}._torch.shared_tensor").SharedTensorContainer

    def new_handoff_id(self, node: int) -> int:
        """An id that no other node gives out. Its generator takes other arguments in every line of versions."""
        make = _import(f"{NAME}.llmapi.disagg_utils").get_global_disagg_request_id
        names = set(inspect.signature(make).parameters)
        if {"node_id", "process_id"} <= names:
            return int(make(**dict(zip(("node_id", "process_id"), divmod(node, _PROCESSES), strict=True))))
        if "machine_id" in names:
            return int(make(machine_id=node))
        raise ConfigError(
            f"trtllm {self.version}: get_global_disagg_request_id takes {sorted(names)}, which is not known"
        )


def open_package(backend: str = "pytorch", log_level: str = "info") -> Package:
    """Imports it. Raises ConfigError, in one line, if it is not installed, cannot run here, or is not supported."""
    # Read when it is imported; usage statistics are on by default.
    os.environ.setdefault("TRTLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("TLLM_LOG_LEVEL", _LOG_LEVELS[log_level])
    with contextlib.redirect_stdout(sys.stderr):
        package = _import(NAME)
        version = _supported(package)
        llmapi = _import(f"{NAME}.llmapi")
        llm = _import(f"{NAME}._torch.auto_deploy").LLM if backend == "autodeploy" else package.LLM
        params = llmapi.DisaggregatedParams
        return Package(
            version=version,
            llm=llm,
            sampling_params=package.SamplingParams,
            disaggregated_params=params,
            logprob=_import(f"{NAME}.executor.result").Logprob,
            request_error=_import(f"{NAME}.executor.utils").RequestError,
            llmapi=llmapi,
            handoff_fields=frozenset(field.name for field in dataclasses.fields(params)),
            sampling_arguments=frozenset(inspect.signature(package.SamplingParams).parameters),
            generate_arguments=frozenset(inspect.signature(llm.generate_async).parameters),
        )


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"engine.kind trtllm needs TensorRT-LLM, which cannot be imported ({why}): {_HOW}") from error


def _supported(package: ModuleType) -> Version:
    try:
        version = Version(str(package.__version__))
    except (AttributeError, InvalidVersion) as error:
        raise ConfigError(f"{NAME} does not say its version: {_HOW}") from error
    if version < _OLDEST or version >= _END or _GAP[0] <= version < _GAP[1]:
        raise ConfigError(f"{NAME} {version} is not supported; 1.2, 1.3 from rc22 on, and 1.4 are")
    return version
