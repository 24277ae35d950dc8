"""Makes the stand-in importable as tensorrt_llm, in one version, for a while."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from fake_tensorrt_llm import llm, mm_encoder, shared_tensor
from fake_tensorrt_llm.collector import collector_of
from fake_tensorrt_llm.tables import AUTODEPLOY, LLM, SECTIONS, TABLES, VersionTable
from fake_tensorrt_llm.values import (
    Logprob,
    RequestError,
    SamplingParams,
    SchedulingParams,
    disaggregated_params,
    strict,
    torch_llm_args,
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
        # One that hangs may be left over.
        llm.RUNNING.clear()
        mm_encoder.ENCODERS.clear()


def _modules(table: VersionTable) -> dict[str, ModuleType]:
    params = disaggregated_params(table)
    sections: dict[str, Any] = {name: strict(name, fields) for name, fields in SECTIONS.items()}
    sections["TorchLlmArgs"] = torch_llm_args(LLM)
    sections["CacheTransceiverConfig"] = strict("CacheTransceiverConfig", table.transceiver)
    torch_llm = llm.llm_of(table, LLM, params)
    auto_llm = llm.llm_of(table, AUTODEPLOY, params)
    return {
        "tensorrt_llm": _module(
            "tensorrt_llm", __version__=table.version, LLM=torch_llm, SamplingParams=SamplingParams
        ),
        "tensorrt_llm.llmapi": _module("tensorrt_llm.llmapi", DisaggregatedParams=params, **sections),
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
        assert 0 <= node_id < 256
        assert 0 <= process_id < 64
        return llm.next_context_id(node_id, process_id)

    return {"get_global_disagg_request_id": by_node} if table.id_arguments else {}


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(members)
    return module
