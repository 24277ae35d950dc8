"""What TensorRT-LLM is started with, typed: the arguments of its `LLM` that this adapter knows, with their defaults.

The names and defaults are TensorRT-LLM's own (`TorchLlmArgs`), so that its documentation applies. Whatever is not here
is refused: it may mean something else in another version.
"""

from typing import Literal

from pydantic import Field

from rpc.config import Section

CapacityPolicy = Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"]
TransceiverBackend = Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"]

# AutoDeploy's LLM does not take them.
AUTODEPLOY_UNKNOWN = (
    "scheduler_config",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "moe_cluster_parallel_size",
    "moe_tensor_parallel_size",
    "moe_expert_parallel_size",
    "enable_attention_dp",
)
# What `MultimodalEncoder` is given of them; a file may be shared with other roles.
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


class SchedulerArguments(Section):
    """`SchedulerConfig`. Without `dynamic_batch_config`, which has no effect in the PyTorch backend."""

    capacity_scheduler_policy: CapacityPolicy = "GUARANTEED_NO_EVICT"
    context_chunking_policy: Literal["EQUAL_PROGRESS", "FIRST_COME_FIRST_SERVED"] | None = None


class TransceiverArguments(Section):
    """`CacheTransceiverConfig`."""

    backend: TransceiverBackend | None = None
    transceiver_runtime: Literal["CPP", "PYTHON", "auto"] | None = None
    max_tokens_in_buffer: int | None = Field(default=None, ge=1)
    kv_transfer_timeout_ms: int | None = Field(default=None, ge=1)
    kv_transfer_sender_future_timeout_ms: int | None = Field(default=None, ge=1)


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
    """One of the speculative configurations, by `decoding_type`."""

    decoding_type: Literal["Eagle", "Eagle3", "MTP", "NGram", "Draft_Target", "Lookahead", "Medusa"]
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
    cuda_graph_config: CudaGraphArguments | None = None
    speculative_config: SpeculativeArguments | None = None
    enable_lora: bool = False
    lora_config: LoraArguments | None = None
    otlp_traces_endpoint: str | None = None
    return_perf_metrics: bool = True
    enable_iter_perf_stats: bool = True

    @property
    def gpus(self) -> int:
        """How many this engine takes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def attention_dp_size(self) -> int:
        """Ranks that requests can be sent to: each has the attention, and a cache, of its own."""
        return self.tensor_parallel_size if self.enable_attention_dp else 1

    @property
    def can_hand_over(self) -> bool:
        """Whether KV can leave or enter this engine."""
        return self.cache_transceiver_config is not None
