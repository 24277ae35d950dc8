"""The values of the stand-in's interface: strict about their fields, like the real ones."""

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
    """Where a request is to run."""

    attention_dp_rank: int | None = None
    attention_dp_relax: bool | None = None


class RequestError(Exception):
    """One request has failed, and the engine has not."""


SamplingParams = make_dataclass(
    "SamplingParams", [(name, Any, field(default=None)) for name in SAMPLING], slots=True, kw_only=True
)


def strict(name: str, fields: tuple[str, ...]) -> type:
    """A configuration with these fields and no others; None is unset."""
    return make_dataclass(name, [(each, Any, field(default=None)) for each in fields], kw_only=True)


def torch_llm_args(names: tuple[str, ...]) -> type:
    """The arguments of an LLM as a model that can say what it takes."""
    return type(
        "TorchLlmArgs",
        (),
        {
            "model_fields": dict.fromkeys(names),
            "model_json_schema": staticmethod(lambda: {"properties": {name: {} for name in names}}),
        },
    )


def disaggregated_params(table: VersionTable) -> type:
    """DisaggregatedParams of one version: slots, keywords only, request types as they are."""

    def check(self: Any) -> None:
        if self.request_type is not None:
            self.request_type = self.request_type.lower()
            if self.request_type not in ("context_only", "generation_only", "context_and_generation"):
                raise ValueError(f"Unknown request type: {self.request_type}")
        if self.multimodal_embedding_handles is not None:
            _check_hashes(self)

    return make_dataclass(
        "DisaggregatedParams",
        [(name, Any, field(default=None)) for name in table.handoff],
        namespace={"__post_init__": check},
        slots=True,
        kw_only=True,
    )


def _check_hashes(params: Any) -> None:
    """Given, they are eight integers for each handle; else they are random, and nothing is ever found again."""
    handles, hashes = params.multimodal_embedding_handles, params.multimodal_hashes
    if hashes is None:
        params.multimodal_hashes = [[random.randrange(-(2**31), 2**31) for _ in range(8)] for _ in handles]
        return
    assert len(handles) == len(hashes)
    for eight in hashes:
        assert isinstance(eight, list)
        assert len(eight) == 8
        assert all(isinstance(number, int) for number in eight)
