"""The values of the stand-in's interface: strict about their fields, like the real ones."""

import math
import random
from dataclasses import dataclass, field, make_dataclass
from typing import Any

from fake_tensorrt_llm.tables import SAMPLING, VersionTable


@dataclass(slots=True)
class Logprob:
    """Of one token at one position."""

    logprob: float
    rank: int | None = None


@dataclass(slots=True)
class CompletionOutput:
    """Cumulative: lists grow in place."""

    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    disaggregated_params: Any = None
    request_perf_metrics: Any = None


@dataclass(slots=True, kw_only=True)
class SchedulingParams:
    """The place at which a request is to run."""

    attention_dp_rank: int | None = None
    attention_dp_relax: bool | None = None


class RequestError(RuntimeError):
    """One request has failed, and the engine has not. Upstream it is a RuntimeError too."""


def _check_sampling(self: Any) -> None:
    """Upstream checks ranges, and no types."""
    for name, low, high in (("top_p", 0, 1), ("min_p", 0, 1), ("temperature", 0, math.inf), ("top_k", 0, math.inf)):
        value = getattr(self, name)
        if value is not None and not low <= value <= high:
            raise ValueError(f"require {low} <= {name} <= {high}, got {name}={value}")
    if self.logprobs is not None and self.logprobs < 0:
        raise ValueError("require logprobs >= 0")


SamplingParams = make_dataclass(
    "SamplingParams",
    [(name, Any, field(default=None)) for name in SAMPLING],
    namespace={"__post_init__": _check_sampling},
    slots=True,
    kw_only=True,
)


GuidedDecodingParams = make_dataclass(
    "GuidedDecodingParams",
    [(name, Any, field(default=None)) for name in ("json", "regex", "grammar", "json_object", "structural_tag")],
    slots=True,
    kw_only=True,
)


def disaggregated_params(table: VersionTable) -> type:
    """DisaggregatedParams of one version: slots, keywords only, request types as they are."""

    def check(self: Any) -> None:
        if self.request_type is not None:
            self.request_type = self.request_type.lower()
            if self.request_type not in ("context_only", "generation_only", "context_and_generation"):
                raise ValueError(f"Unknown request type: {self.request_type}")
        _check_hashes(self, table)

    return make_dataclass(
        "DisaggregatedParams",
        [(name, Any, field(default=None)) for name in table.handoff],
        namespace={"__post_init__": check},
        slots=True,
        kw_only=True,
    )


def _check_hashes(params: Any, table: VersionTable) -> None:
    """Given, they are eight integers for each handle. Older versions make one up for all handles."""
    handles, hashes = params.multimodal_embedding_handles, params.multimodal_hashes
    has_runs = "multimodal_item_runs" in table.handoff
    if handles is not None and hashes is None and not has_runs:
        params.multimodal_hashes = [[random.randrange(-(2**31), 2**31) for _ in range(8)]] * len(handles)
    if hashes is None:
        return
    assert handles is None or len(handles) == len(hashes)
    assert all(isinstance(eight, list) and len(eight) == 8 for eight in hashes)
    assert all(isinstance(number, int) for eight in hashes for number in eight)
    if table.hashes_need_runs:
        assert params.multimodal_item_runs is not None, "multimodal_hashes requires multimodal_item_runs"
        _check_runs(params.multimodal_item_runs, len(hashes))


def _check_runs(runs: Any, items: int) -> None:
    assert len(runs) == items
    end = 0
    for item in runs:
        assert isinstance(item, list)
        assert item
        for start, length, others in item:
            assert start >= end
            assert length > 0
            assert isinstance(others, list)
            end = start + length
