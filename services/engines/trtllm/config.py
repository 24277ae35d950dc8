"""The configuration of the TensorRT-LLM engine. Importable without TensorRT-LLM.

The names and defaults of its arguments are those of TensorRT-LLM's `TorchLlmArgs`, so its documentation applies. Other
keys are refused: they may mean something else in another version.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, field_validator

from runtime.config import Section
from services.engines.context import ExternalEngineConfig

CapacityPolicy = Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"]
TransceiverBackend = Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"]

# AutoDeploy's LLM does not take them.
AUTODEPLOY_UNKNOWN = (
    "build_config",
    "scheduler_config",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "moe_cluster_parallel_size",
    "moe_tensor_parallel_size",
    "moe_expert_parallel_size",
    "enable_attention_dp",
    "cp_config",
)
# Other back ends than AutoDeploy, which leaves them out, have none of them.
AUTODEPLOY_ONLY = ("build_config", "cp_config")
# The arguments that `MultimodalEncoder` takes; a file of arguments may be shared with other roles.
ENCODER_KNOWN = ("dtype", "trust_remote_code", "tensor_parallel_size", "max_batch_size", "max_num_tokens")


class KvCacheArguments(Section):
    """`KvCacheConfig`."""

    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    max_tokens: int | None = Field(default=None, ge=1)
    max_attention_window: tuple[int, ...] | None = None
    free_gpu_memory_fraction: float = Field(default=0.9, gt=0, lt=1)
    host_cache_size: int | None = Field(default=None, ge=0)
    event_buffer_max_size: int = Field(default=0, ge=0)
    dtype: str = "auto"
    tokens_per_block: int = Field(default=32, ge=1)


class DynamicBatchArguments(Section):
    """`DynamicBatchConfig`, which has no effect in the PyTorch backend."""

    enable_batch_size_tuning: bool = True
    enable_max_num_tokens_tuning: bool = False
    dynamic_batch_moving_average_window: int = Field(default=128, ge=1)


class SchedulerArguments(Section):
    """`SchedulerConfig`."""

    capacity_scheduler_policy: CapacityPolicy = "GUARANTEED_NO_EVICT"
    context_chunking_policy: Literal["EQUAL_PROGRESS", "FIRST_COME_FIRST_SERVED"] | None = None
    dynamic_batch_config: DynamicBatchArguments | None = None


class TransceiverArguments(Section):
    """`CacheTransceiverConfig`."""

    backend: TransceiverBackend | None = None
    transceiver_runtime: Literal["CPP", "PYTHON", "auto"] | None = None
    max_tokens_in_buffer: int | None = Field(default=None, ge=1)
    kv_transfer_timeout_ms: int | None = Field(default=None, ge=1)
    kv_transfer_sender_future_timeout_ms: int | None = Field(default=None, ge=1)


class KvConnectorArguments(Section):
    """`KvCacheConnectorConfig`: classes that keep blocks beyond TensorRT-LLM's own caches, in memory of their own."""

    connector_module: str = Field(min_length=1)
    connector_scheduler_class: str = Field(min_length=1)
    connector_worker_class: str = Field(min_length=1)


class CudaGraphArguments(Section):
    """`CudaGraphConfig`."""

    enable_padding: bool = False
    batch_sizes: tuple[int, ...] | None = None
    max_batch_size: int | None = Field(default=None, ge=1)


class LoraArguments(Section):
    """`LoraConfig`."""

    lora_dir: tuple[str, ...] = ()
    lora_target_modules: tuple[str, ...] = ()
    max_lora_rank: int = Field(default=64, ge=1)
    max_loras: int | None = Field(default=None, ge=1)
    max_cpu_loras: int | None = Field(default=None, ge=1)


class SpeculativeArguments(Section):
    """One of the speculative configurations, by `decoding_type`: those that the PyTorch backend runs."""

    decoding_type: Literal["Eagle", "Eagle3", "MTP", "NGram", "Draft_Target"]
    max_draft_len: int | None = Field(default=None, ge=1)
    speculative_model_dir: str | None = None
    num_nextn_predict_layers: int | None = Field(default=None, ge=1)
    max_matching_ngram_size: int | None = Field(default=None, ge=1)


class EngineArguments(Section):
    """The arguments of `LLM` and `MultimodalEncoder`, except for the model itself."""

    dtype: str = "auto"
    trust_remote_code: bool = False
    tensor_parallel_size: int = Field(default=1, ge=1)
    pipeline_parallel_size: int = Field(default=1, ge=1)
    context_parallel_size: int = Field(default=1, ge=1)
    moe_expert_parallel_size: int | None = Field(default=None, ge=1)
    moe_tensor_parallel_size: int | None = Field(default=None, ge=1)
    moe_cluster_parallel_size: int | None = Field(default=None, ge=1)
    gpus_per_node: int | None = Field(default=None, ge=1)
    enable_attention_dp: bool = False
    max_batch_size: int = Field(default=2048, ge=1)
    max_num_tokens: int = Field(default=8192, ge=1)
    max_seq_len: int | None = Field(default=None, ge=2)
    max_beam_width: int = Field(default=1, ge=1)
    enable_chunked_prefill: bool = False
    disable_overlap_scheduler: bool = False
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    kv_cache_config: KvCacheArguments = KvCacheArguments()
    scheduler_config: SchedulerArguments = SchedulerArguments()
    cache_transceiver_config: TransceiverArguments | None = None
    kv_connector_config: KvConnectorArguments | None = None
    cuda_graph_config: CudaGraphArguments | None = None
    speculative_config: SpeculativeArguments | None = None
    enable_lora: bool = False
    lora_config: LoraArguments | None = None
    build_config: Mapping[str, object] | None = None
    cp_config: Mapping[str, object] | None = None
    otlp_traces_endpoint: str | None = None
    return_perf_metrics: bool = True
    enable_iter_perf_stats: bool = True

    @property
    def gpus(self) -> int:
        """The number of GPUs that this engine uses."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def attention_dp_size(self) -> int:
        """The number of ranks that requests can be sent to, each with its own attention and cache."""
        return self.tensor_parallel_size if self.enable_attention_dp else 1

    @property
    def can_hand_over(self) -> bool:
        """True if KV can leave or enter this engine."""
        return self.cache_transceiver_config is not None


EXPERIMENTAL = "it has not been run on real TensorRT-LLM yet"
# The ids of handoffs have room for this many nodes in every version.
MAX_NODES = 1024


class TrtllmConfig(ExternalEngineConfig):
    """Options of the TensorRT-LLM engine, which is experimental: it has not been run on real TensorRT-LLM yet.

    Its own arguments come from three places, the later the stronger: `args`, the YAML file `extra_engine_args`, and the
    JSON text `override_engine_args`. Sections are merged key by key; lists are replaced whole.
    """

    kind: Literal["trtllm"] = Field(default="trtllm", description="Experimental: not yet run on real TensorRT-LLM.")
    backend: Literal["pytorch", "autodeploy"] = Field(
        default="pytorch", description="autodeploy may be written _autodeploy, as TensorRT-LLM does."
    )
    args: EngineArguments = EngineArguments()
    whole_requests: bool = Field(
        default=False,
        description="A decode worker that accepts no handoffs, by choice: it runs prompts itself.",
    )
    handoff_deadline_seconds: float = Field(
        default=30.0, gt=0, description="The longest time from the end of a prefill until its KV has been fetched."
    )
    node_id: int | None = Field(
        default=None,
        ge=0,
        lt=MAX_NODES,
        description="A number that no other worker has, part of handoff ids. If unset, the registry gives one.",
    )
    max_handoff_tokens: int | None = Field(
        default=None, ge=1, description="The most tokens of handoffs that may wait to be fetched."
    )
    max_logprobs: int = Field(default=20, ge=0)
    abort: bool = Field(default=True, description="Whether cancelled requests are aborted inside the engine.")
    abort_seconds: float = Field(
        default=5.0,
        gt=0,
        description="How long the engine may take to end an aborted request; it then counts as ended.",
    )
    canary_patience_seconds: float = Field(
        default=8.0, gt=0, description="The engine has failed if that token does not come within this time."
    )
    stall_seconds: float = Field(
        default=900.0,
        gt=0,
        description="The engine has failed if it has work and makes no progress for this long.",
    )

    def max_node_ids(self, roles: Sequence[str]) -> int:
        """Returns the limit of TensorRT-LLM: the ids of its handoffs contain a number of the prefill worker."""
        return MAX_NODES if self.node_id is None and "prefill" in roles else 0

    @field_validator("backend", mode="before")
    @classmethod
    def _as_upstream(cls, backend: object) -> object:
        return "autodeploy" if backend == "_autodeploy" else backend
