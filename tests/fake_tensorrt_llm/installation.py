"""Makes the stand-in importable as tensorrt_llm, in one version, for a while."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from fake_tensorrt_llm import llm, mm_encoder, shared_tensor
from fake_tensorrt_llm.collector import collector_of
from fake_tensorrt_llm.tables import TABLES, VersionTable
from fake_tensorrt_llm.values import (
    GuidedDecodingParams,
    Logprob,
    RequestError,
    SamplingParams,
    SchedulingParams,
    disaggregated_params,
)


@contextmanager
def installed(version: str) -> Iterator[VersionTable]:
    """`import tensorrt_llm` finds this version while the context is open."""
    table = TABLES[version]
    modules = _modules(table)
    sys.modules.update(modules)
    try:
        yield table
    finally:
        for name in modules:
            sys.modules.pop(name, None)
        llm.FABRIC.clear()
        shared_tensor.MEMORY.clear()
        # A hung one may be left over.
        llm.RUNNING.clear()
        mm_encoder.ENCODERS.clear()


def _modules(table: VersionTable) -> dict[str, ModuleType]:
    params = disaggregated_params(table)
    torch_llm = llm.llm_of(table, table.arguments.pytorch, params)
    auto_llm = llm.llm_of(table, table.arguments.autodeploy, params)
    return {
        "tensorrt_llm": _module(
            "tensorrt_llm", __version__=table.version, LLM=torch_llm, SamplingParams=SamplingParams
        ),
        "tensorrt_llm.llmapi": _module(
            "tensorrt_llm.llmapi",
            DisaggregatedParams=params,
            GuidedDecodingParams=GuidedDecodingParams,
            **table.arguments.exported,
        ),
        "tensorrt_llm.llmapi.disagg_utils": _module("tensorrt_llm.llmapi.disagg_utils", **_ids(table)),
        "tensorrt_llm.executor": _module("tensorrt_llm.executor"),
        "tensorrt_llm.executor.result": _module("tensorrt_llm.executor.result", Logprob=Logprob),
        "tensorrt_llm.executor.utils": _module("tensorrt_llm.executor.utils", RequestError=RequestError),
        "tensorrt_llm._torch": _module("tensorrt_llm._torch"),
        "tensorrt_llm.llmapi.mm_encoder": _module(
            "tensorrt_llm.llmapi.mm_encoder", MultimodalEncoder=mm_encoder.encoder_of(table, params)
        ),
        "tensorrt_llm.scheduling_params": _module("tensorrt_llm.scheduling_params", SchedulingParams=SchedulingParams),
        "tensorrt_llm.metrics": _module("tensorrt_llm.metrics", MetricsCollector=collector_of(table)),
        "tensorrt_llm._torch.shared_tensor": _module(
            "tensorrt_llm._torch.shared_tensor", SharedTensorContainer=shared_tensor.SharedTensorContainer
        ),
        "tensorrt_llm._torch.auto_deploy": _module("tensorrt_llm._torch.auto_deploy", LLM=auto_llm),
    }


def _ids(table: VersionTable) -> dict[str, Any]:
    def by_node(node_id: int, process_id: int) -> int:
        if not (0 <= node_id < 256 and 0 <= process_id < 64):
            raise ValueError("node_id must be in [0, 256) and process_id in [0, 64)")
        return llm.next_context_id(node_id, process_id)

    def by_machine(machine_id: int) -> int:
        if not 0 <= machine_id < 1024:
            raise ValueError("machine_id must be in [0, 1024)")
        return llm.next_context_id(*divmod(machine_id, 64))

    found = {("node_id", "process_id"): by_node, ("machine_id",): by_machine}.get(table.id_arguments)
    return {"get_global_disagg_request_id": found} if found else {}


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(members)
    return module
