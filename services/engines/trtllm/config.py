"""What can be set of the TensorRT-LLM engine; importable without TensorRT-LLM."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from rpc.config import Section
from services.engines.trtllm.arguments import EngineArguments

# What the ids of handoffs have room for in every version.
MAX_NODES = 1024


class TrtllmConfig(Section):
    """Options of the TensorRT-LLM engine.

    Its own arguments come from three places, the later the stronger: `args`, the YAML file `extra_engine_args`, and the
    JSON text `override_engine_args`. Sections are merged key by key; lists are replaced whole.
    """

    kind: Literal["trtllm"] = "trtllm"
    model: Path = Field(description="A folder in Hugging Face's checkpoint layout. Nothing is ever downloaded.")
    name: str = Field(default="", description="The name under which it is served; the folder's name if empty.")
    backend: Literal["pytorch", "autodeploy"] = "pytorch"
    args: EngineArguments = EngineArguments()
    extra_engine_args: Path | None = Field(default=None, description="Such as deploy/engine_configs/llama/agg.yaml.")
    override_engine_args: str = Field(default="", description="A JSON object.")
    handoff_deadline_seconds: float = Field(
        default=30.0, gt=0, description="The longest from the end of a prefill until its KV has been fetched."
    )
    node_id: int | None = Field(
        default=None,
        ge=0,
        lt=MAX_NODES,
        description="Of no other worker; part of the ids of handoffs. Unset, the registry gives one.",
    )
    max_waiting: int = Field(default=256, ge=1, description="Requests beyond a full batch; one more is Overloaded.")
    max_handoff_tokens: int | None = Field(
        default=None, ge=1, description="Tokens of handoffs that wait to be fetched; more are refused as Overloaded."
    )
    max_logprobs: int = Field(default=20, ge=0)
    abort: bool = Field(default=True, description="Whether requests are aborted inside the engine when they end early.")
    slow_reader_seconds: float = Field(
        default=30.0, gt=0, description="Nobody has read what there is of an answer for so long: it is aborted."
    )
    canary_seconds: float | None = Field(
        default=60.0, gt=0, description="Idle for so long, the engine is asked for a token; null never asks."
    )
    canary_patience_seconds: float = Field(
        default=30.0, gt=0, description="That token has not come for so long: the engine counts as failed."
    )
    stall_seconds: float = Field(
        default=900.0, gt=0, description="Work in flight and no progress for so long: the engine counts as failed."
    )
