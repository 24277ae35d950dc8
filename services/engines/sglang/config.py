"""The configuration of the SGLang engine. Importable without SGLang.

The names of its arguments are those of SGLang's `ServerArgs`, so its documentation applies. Other keys are refused:
they may mean something else in another version, or be set by Baton.
"""

from typing import Literal

from pydantic import Field

from runtime.config import Section
from services.engines.context import ExternalEngineConfig


class SglangArguments(Section):
    """The arguments of `ServerArgs`, except for the model, the disaggregation, KV events and metrics."""

    device: str | None = None
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    quantization: str | None = None
    load_format: str = "auto"
    trust_remote_code: bool = False
    random_seed: int = 0
    tp_size: int = Field(default=1, ge=1)
    context_length: int | None = Field(default=None, ge=2)
    max_running_requests: int = Field(default=128, ge=1)
    chunked_prefill_size: int = Field(default=2048, ge=1)
    page_size: int = Field(default=32, ge=1)
    mem_fraction_static: float | None = Field(default=None, gt=0, lt=1)
    max_total_tokens: int | None = Field(default=None, ge=1)
    kv_cache_dtype: str = "auto"
    disable_radix_cache: bool = False
    disable_cuda_graph: bool = False
    disable_overlap_schedule: bool = False
    attention_backend: str | None = None
    sampling_backend: str | None = None
    enable_deterministic_inference: bool = Field(
        default=True, description="Seeds count only with it; an engine without it refuses them."
    )
    num_reserved_decode_tokens: int = Field(
        default=64, ge=0, description="Tokens that a decode engine keeps free for each request that runs or arrives."
    )


class RoomSettings(Section):
    """SGLang's bootstrap rooms, in which its two sides meet."""

    host: str = Field(default="127.0.0.1", description="Where the other side reaches this engine.")
    port: int = Field(
        default=8998,
        ge=1,
        le=65535,
        description="The port of the bootstrap servers of all prefill workers; two on one host need two addresses.",
    )
    bootstrap_seconds: int = Field(
        default=10, ge=1, description="A prefill fails whose decode worker has not named its blocks for so long."
    )
    seconds: int = Field(default=300, ge=1, description="The longest life of a room; Baton's lease ends it earlier.")
    fetch_seconds: float = Field(default=30.0, gt=0, description="The longest wait for KV whose prefill has answered.")
    closing_seconds: float = Field(
        default=1.0,
        gt=0,
        description="Blocks of a room that ends early are not given out for so long: its sender may still write.",
    )
    ucx_tls: str = Field(default="", description="UCX_TLS, such as cma,sm,tcp,self; empty leaves UCX's choice.")


class SglangConfig(ExternalEngineConfig):
    """Options of the SGLang engine.

    Its own arguments come from three places, the later the stronger: `args`, the YAML file `extra_engine_args`, and the
    JSON text `override_engine_args`. Lists are replaced whole.
    """

    kind: Literal["sglang"] = "sglang"
    args: SglangArguments = SglangArguments()
    handoff: RoomSettings = RoomSettings()
    whole_requests: bool = Field(
        default=False, description="A decode worker that accepts no handoffs, by choice, and has a prefix cache."
    )
    max_logprobs: int = Field(default=20, ge=0, le=128, description="Alternatives that a request may ask for.")
    kv_events: bool = Field(default=True, description="Whether the contents of the prefix cache are reported.")
    kv_event_steps: int = Field(default=10_000, ge=1, description="Steps of events that SGLang keeps for a replay.")
    metrics: bool = Field(default=True, description="Whether SGLang's own metrics are kept and shown.")
    start_seconds: float = Field(default=900.0, gt=0, description="The longest time that loading may take.")
    abort_seconds: float = Field(
        default=10.0, gt=0, description="How long SGLang may take to free an aborted request's blocks."
    )
    canary_patience_seconds: float = Field(
        default=30.0, gt=0, description="The engine has failed if that token does not come within this time."
    )
