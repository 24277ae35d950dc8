"""`python -m services.engines.trtllm_schema > schema.json`: what an installed TensorRT-LLM accepts, to compare."""

import dataclasses
import inspect
import json
import sys
from typing import Any

from rpc.errors import ConfigError
from services.engines.trtllm.package import Package, open_package

_SECTIONS = ("KvCacheConfig", "SchedulerConfig", "CacheTransceiverConfig", "CudaGraphConfig", "LoraConfig")


def dump(package: Package) -> dict[str, object]:
    """Names only, sorted: they are what the adapter and the stand-in rely on. The JSON schema, where there is one."""
    arguments = getattr(package.llmapi, "TorchLlmArgs", None)
    return {
        "version": str(package.version),
        "handoff": sorted(package.handoff_fields),
        "generate": sorted(package.generate_arguments - {"self"}),
        "sampling": sorted(package.sampling_arguments),
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
