"""`python -m services.engines.trtllm_schema > schema.json`: what an installed TensorRT-LLM accepts, to compare."""

import dataclasses
import inspect
import json
import sys
from typing import Any

from rpc.errors import ConfigError
from services.engines.trtllm.package import Package, open_package

# What the adapter calls by name.
_METHODS = ("generate_async", "get_stats", "get_kv_cache_events", "shutdown", "_check_health")
_SHARED = ("from_tensor", "dump_to_dict", "from_dict", "get_local_view")
_METRICS = ("log_request_metrics_dict", "log_metrics_dict", "log_iteration_stats")
_SECTIONS = ("KvCacheConfig", "SchedulerConfig", "CacheTransceiverConfig", "CudaGraphConfig", "LoraConfig")


def dump(package: Package) -> dict[str, object]:
    """Names only, sorted: they are what the adapter and the stand-in rely on. The JSON schema, where there is one."""
    arguments = getattr(package.llmapi, "TorchLlmArgs", None)
    scheduling = package.on_rank(0)
    return {
        "version": str(package.version),
        "handoff": sorted(package.handoff_fields),
        "generate": sorted(package.generate_arguments - {"self"}),
        "sampling": sorted(package.sampling_arguments),
        "arguments": _fields(arguments) if arguments is not None else None,
        "scheduling": _fields(type(scheduling)),
        "methods": sorted(name for name in _METHODS if hasattr(package.llm, name)),
        "encoder": sorted(inspect.signature(package.encoder).parameters),
        "shared_tensor": sorted(name for name in _SHARED if hasattr(package.shared_tensor(), name)),
        "metrics": sorted(name for name in _METRICS if hasattr(package.metrics_collector, name)),
        "sections": {name: _fields(getattr(package.llmapi, name)) for name in _SECTIONS},
        "json_schema": arguments.model_json_schema() if arguments is not None else None,
    }


def _fields(section: Any) -> list[str]:
    """Of a pydantic model, a dataclass, or whatever has a signature."""
    if hasattr(section, "model_fields"):
        return sorted(section.model_fields)
    if dataclasses.is_dataclass(section):
        return sorted(field.name for field in dataclasses.fields(section))
    return sorted(inspect.signature(section).parameters)


def main() -> None:
    """Exit code 2 where it is not installed."""
    try:
        print(json.dumps(dump(open_package()), indent=2))
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
