"""The arguments that an installed TensorRT-LLM accepts, as JSON: `python -m tools.trtllm_arguments > schema.json`."""

import dataclasses
import inspect
import json
import sys
from types import NoneType
from typing import Any, get_args

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from baton.errors import ConfigError
from services.engines.trtllm.package import Package, open_package

# The names that the adapter uses.
_METHODS = ("generate_async", "get_stats", "get_kv_cache_events", "shutdown", "_check_health")
_SHARED = ("from_tensor", "dump_to_dict", "from_dict", "get_local_view")
_METRICS = ("log_request_metrics_dict", "log_metrics_dict", "log_iteration_stats")
_SECTIONS = ("kv_cache_config", "scheduler_config", "cache_transceiver_config", "cuda_graph_config", "lora_config")


class _Lenient(GenerateJsonSchema):
    """Describes a type that has no JSON schema, such as a tokenizer, as a value of any type."""

    def handle_invalid_for_json_schema(self, schema: object, error_info: str) -> JsonSchemaValue:
        del schema
        return {"description": error_info}


def dump(package: Package) -> dict[str, object]:
    """Sorted names that the adapter and the stand-in rely on, and the JSON schema of TorchLlmArgs."""
    arguments = package.llmapi.TorchLlmArgs
    scheduling = package.on_rank(0)
    return {
        "version": str(package.version),
        "handoff": sorted(package.handoff_fields),
        "generate": sorted(package.generate_arguments - {"self"}),
        "sampling": sorted(package.sampling_arguments),
        "arguments": _fields(arguments),
        "scheduling": _fields(type(scheduling)),
        "methods": sorted(name for name in _METHODS if hasattr(package.llm, name)),
        "encoder": sorted(inspect.signature(package.encoder).parameters),
        "shared_tensor": sorted(name for name in _SHARED if hasattr(package.shared_tensor(), name)),
        "metrics": sorted(name for name in _METRICS if hasattr(package.metrics_collector, name)),
        "sections": {name: _fields(_section(arguments, name)) for name in _SECTIONS},
        "json_schema": arguments.model_json_schema(schema_generator=_Lenient),
    }


def _section(arguments: Any, name: str) -> Any:
    """Returns the class of a section, found by its annotation, since `llmapi` does not export all of them."""
    annotation = arguments.model_fields[name].annotation
    return next(one for one in (*get_args(annotation), annotation) if one is not NoneType)


def _fields(section: Any) -> list[str]:
    """Returns the names of a pydantic model's fields, of a dataclass's, or of a callable's parameters."""
    if hasattr(section, "model_fields"):
        return sorted(section.model_fields)
    if dataclasses.is_dataclass(section):
        return sorted(field.name for field in dataclasses.fields(section))
    return sorted(inspect.signature(section).parameters)


def main() -> None:
    """Prints the names as JSON. Exits with code 2 if TensorRT-LLM is not installed."""
    try:
        print(json.dumps(dump(open_package()), indent=2))
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
