"""The configuration of the vLLM engine. Importable without vLLM.

The names and defaults of its arguments are those of vLLM's `AsyncEngineArgs`, so its documentation applies. Other keys
are refused: they may mean something else in another version, or be set by Baton.
"""

from typing import Literal

from pydantic import ByteSize, Field, model_validator
from typing_extensions import Self

from runtime.config import Section
from services.engines.context import ExternalEngineConfig
from services.engines.lora.options import LoraOptions

BLOCK_MULTIPLE = 32


class SpeculationArguments(Section):
    """`speculative_config`, by n-grams of the context or by a draft model."""

    method: Literal["ngram", "draft_model", "eagle", "eagle3", "mtp"]
    num_speculative_tokens: int = Field(ge=1)
    model: str | None = None
    prompt_lookup_max: int | None = Field(default=None, ge=1)
    prompt_lookup_min: int | None = Field(default=None, ge=1)
    draft_tensor_parallel_size: int | None = Field(default=None, ge=1)


class VllmArguments(Section):
    """The arguments of `AsyncEngineArgs`, except for the model, the KV transfer, KV events and statistics."""

    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    quantization: str | None = None
    load_format: str = "auto"
    trust_remote_code: bool = False
    seed: int = 0
    tensor_parallel_size: int = Field(default=1, ge=1)
    pipeline_parallel_size: int = Field(default=1, ge=1)
    data_parallel_size: int = Field(default=1, ge=1)
    enable_expert_parallel: bool = False
    max_model_len: int | None = Field(default=None, ge=2)
    max_num_seqs: int = Field(default=128, ge=1)
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    enable_chunked_prefill: bool | None = None
    async_scheduling: bool | None = None
    block_size: int = Field(default=32, ge=BLOCK_MULTIPLE, multiple_of=BLOCK_MULTIPLE)
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    kv_cache_memory_bytes: int | None = Field(default=None, ge=1)
    num_gpu_blocks_override: int | None = Field(default=None, ge=2)
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    max_logprobs: int = Field(default=20, ge=0)
    attention_backend: str | None = None
    speculative_config: SpeculationArguments | None = None


class HandoffSettings(Section):
    """vLLM's NixlConnector. Its lease on a prefill's blocks is Baton's deadline of handoffs."""

    host: str = Field(default="127.0.0.1", description="Where readers reach this engine's NIXL side channel.")
    port: int = Field(default=0, ge=0, le=65535, description="Its first port, one a rank; 0 chooses a free one.")
    seconds: float = Field(
        default=60.0, gt=0, description="vLLM holds a prefill's blocks for this long; over handoff.lease_seconds."
    )
    fetch_seconds: float = Field(default=30.0, gt=0, description="The longest wait for the blocks of another worker.")
    buffer_device: Literal["cpu", "cuda", ""] = Field(default="", description="Empty: that of vLLM's platform.")
    threads: int | None = Field(
        default=None, ge=0, description="NIXL's own threads, which post reads; null: vLLM's default, and none on CPUs."
    )
    ucx_tls: str = Field(default="", description="UCX_TLS, such as cma,sm,tcp,self; empty leaves UCX's choice.")
    ucx_net_devices: str = Field(default="", description="UCX_NET_DEVICES, such as lo.")


class TierSettings(Section):
    """vLLM's OffloadingConnector: prompts' blocks are copied to host memory, and loaded when the pool lacks them."""

    host_bytes: ByteSize = Field(gt=0, description="Host memory of all ranks of an engine together, pinned by vLLM.")


class VllmConfig(ExternalEngineConfig):
    """Options of the vLLM engine: one AsyncLLM in the worker's process, whose core and workers are its children.

    Its own arguments come from three places, the later the stronger: `args`, the YAML file `extra_engine_args`, and the
    JSON text `override_engine_args`. Sections are merged key by key; lists are replaced whole.
    """

    kind: Literal["vllm"] = "vllm"
    args: VllmArguments = VllmArguments()
    handoff: HandoffSettings = HandoffSettings()
    tiers: TierSettings | None = Field(default=None, description="Memory below the pool; null: none.")
    whole_requests: bool = Field(
        default=False, description="A decode worker that accepts no handoffs, by choice: it runs prompts itself."
    )
    guided_decoding: bool = Field(
        default=False, description="vLLM loads the checkpoint's tokenizer too, and follows grammars by llguidance."
    )
    lora: LoraOptions | None = Field(default=None, description="Adapters; null serves none.")
    kv_events: bool = Field(default=True, description="Whether the contents of the prefix cache are reported.")
    kv_event_steps: int = Field(default=10_000, ge=1, description="Steps of events that vLLM keeps for a replay.")
    start_seconds: float = Field(default=900.0, gt=0, description="The longest time that loading may take.")
    abort_seconds: float = Field(
        default=10.0, gt=0, description="How long vLLM may take to free an aborted request's blocks."
    )
    canary_patience_seconds: float = Field(
        default=30.0, gt=0, description="The engine has failed if that token does not come within this time."
    )
    sleep_after_seconds: float | None = Field(
        default=None,
        ge=1,
        description="An engine without requests for so long frees its GPU's memory, and the next request wakes it. "
        "Only with whole_requests; null never sleeps.",
    )
    cpu_kv_cache_gib: int = Field(
        default=4, ge=1, description="On CPUs, unless args has kv_cache_memory_bytes or gpu_memory_utilization."
    )
    cpu_threads_bind: str = Field(
        default="nobind", description="VLLM_CPU_OMP_THREADS_BIND, on CPUs only; auto puts every engine on core 0."
    )

    @model_validator(mode="after")
    def _deadlines_are_in_order(self) -> Self:
        if self.handoff.fetch_seconds > self.handoff.seconds:
            raise ValueError(
                f"handoff.fetch_seconds: {self.handoff.fetch_seconds} must not be over handoff.seconds, "
                f"{self.handoff.seconds}"
            )
        return self
