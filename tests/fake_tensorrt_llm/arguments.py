"""The stand-in's `TorchLlmArgs` and its sections: pydantic models that refuse unknown keys and wrong values.

They have the fields that the adapter can set, with upstream's types, bounds and defaults, and the same differences
between versions. `llmapi` does not export `LoraConfig`.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, create_model, model_validator


class Strict(BaseModel):
    """An unknown key is an error."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())


class Tokenizer:
    """A type that has no JSON schema, as upstream's tokenizers have none."""


class KvCacheConfig(Strict):
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: Annotated[list[PositiveInt], Field(min_length=1)] | None = None
    free_gpu_memory_fraction: float | None = Field(default=0.9, ge=0, le=1)
    host_cache_size: int | None = None
    event_buffer_max_size: int = 0
    dtype: str = "auto"
    tokens_per_block: int = 32


class _KvCacheConfig13(KvCacheConfig):
    use_kv_cache_manager_v2: bool = False


class _KvCacheConfigMain(KvCacheConfig):
    use_kv_cache_manager_v2: bool | Literal["auto"] = "auto"
    kv_cache_event_hash_algo: Literal["auto", "v1_block_key", "v2_sha256", "v2_sha256_64"] = "auto"


class KvCacheConnectorConfig(Strict):
    connector_module: str
    connector_scheduler_class: str
    connector_worker_class: str


class DynamicBatchConfig(Strict):
    enable_batch_size_tuning: bool
    enable_max_num_tokens_tuning: bool
    dynamic_batch_moving_average_window: int


class SchedulerConfig(Strict):
    capacity_scheduler_policy: Literal["MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH"] = "GUARANTEED_NO_EVICT"
    context_chunking_policy: Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"] | None = None
    dynamic_batch_config: DynamicBatchConfig | None = None


class CacheTransceiverConfig(Strict):
    backend: Literal["DEFAULT", "UCX", "NIXL", "MPI"] | None = None
    max_tokens_in_buffer: int | None = None
    kv_transfer_timeout_ms: PositiveInt | None = None


class _CacheTransceiverConfig13(CacheTransceiverConfig):
    backend: Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"] | None = None  # type: ignore[assignment]
    transceiver_runtime: Literal["CPP", "PYTHON"] | None = None
    kv_transfer_sender_future_timeout_ms: PositiveInt | None = 1000


class _CacheTransceiverConfigLate(_CacheTransceiverConfig13):
    kv_transfer_timeout_ms: PositiveInt | None = 60_000
    kv_transfer_poll_interval_ms: PositiveInt | None = 5000
    kv_cache_bounce_size_mb: NonNegativeInt = 0


class _CacheTransceiverConfigMain(_CacheTransceiverConfigLate):
    transceiver_runtime: Literal["CPP", "PYTHON", "auto"] | None = "auto"  # type: ignore[assignment]
    enable_pipelined_transfer: bool = False
    agent_bounce_buffer_enable: bool = False
    agent_bounce_params: dict[str, str] | None = None


class CudaGraphConfig(Strict):
    enable_padding: bool = False
    batch_sizes: list[int] | None = None
    max_batch_size: NonNegativeInt | None = None


class LoraConfig(Strict):
    lora_dir: list[str] = []
    lora_ckpt_source: Literal["hf", "nemo"] = "hf"
    lora_target_modules: list[str] = []
    max_lora_rank: int = 64
    max_loras: int | None = None
    max_cpu_loras: int | None = None


class _Speculative(Strict):
    on_pytorch: ClassVar[bool] = True
    max_draft_len: int | None = None
    speculative_model_dir: str | None = None


class EagleDecodingConfig(_Speculative):
    @model_validator(mode="after")
    def _has_a_draft_model(self) -> "EagleDecodingConfig":
        if not self.max_draft_len or self.speculative_model_dir is None:
            raise ValueError("Eagle needs max_draft_len and a draft model")
        return self


class MTPDecodingConfig(_Speculative):
    num_nextn_predict_layers: int = 1


class NGramDecodingConfig(_Speculative):
    max_matching_ngram_size: int = 2


class DraftTargetDecodingConfig(_Speculative):
    pass


class MedusaDecodingConfig(_Speculative):
    on_pytorch: ClassVar[bool] = False


class LookaheadDecodingConfig(_Speculative):
    on_pytorch: ClassVar[bool] = False


_CLASSES: dict[str, type[_Speculative]] = {
    "Eagle": EagleDecodingConfig,
    "MTP": MTPDecodingConfig,
    "NGram": NGramDecodingConfig,
    "Draft_Target": DraftTargetDecodingConfig,
    "Medusa": MedusaDecodingConfig,
    "Lookahead": LookaheadDecodingConfig,
}


def _named(kind: str, base: type[_Speculative]) -> type[_Speculative]:
    """A class of later versions: its kind is a field, by which the union is told apart."""
    return create_model(f"{base.__name__}", __base__=base, decoding_type=(Literal[kind], kind))


_NAMED = {kind: _named(kind, base) for kind, base in {**_CLASSES, "Eagle3": EagleDecodingConfig}.items()}
_Unnamed = EagleDecodingConfig | MTPDecodingConfig | NGramDecodingConfig | DraftTargetDecodingConfig
_Discriminated: Any = Annotated[Union[tuple(_NAMED.values())], Field(discriminator="decoding_type")]  # noqa: UP007


class _LlmArgs(Strict):
    """The arguments that AutoDeploy takes too."""

    model: str
    tokenizer: str | Tokenizer | None = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    dtype: str = "auto"
    gpus_per_node: int | None = None
    max_batch_size: int | None = 2048
    max_num_tokens: int | None = 8192
    max_seq_len: int | None = None
    max_beam_width: int | None = 1
    enable_chunked_prefill: bool = False
    disable_overlap_scheduler: bool = False
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    cuda_graph_config: CudaGraphConfig | None = CudaGraphConfig()
    enable_lora: bool = False
    lora_config: LoraConfig | None = None
    otlp_traces_endpoint: str | None = None
    return_perf_metrics: bool = False
    enable_iter_perf_stats: bool = False

    @model_validator(mode="after")
    def _speculates_on_pytorch(self) -> "_LlmArgs":
        speculative = getattr(self, "speculative_config", None)
        if speculative is not None and not speculative.on_pytorch:
            raise ValueError(f"{type(speculative).__name__} is not supported by the pytorch backend")
        return self


_PARALLEL: dict[str, Any] = {
    "tensor_parallel_size": (int, 1),
    "pipeline_parallel_size": (int, 1),
    "context_parallel_size": (int, 1),
    "moe_cluster_parallel_size": (int | None, None),
    "moe_tensor_parallel_size": (int | None, None),
    "moe_expert_parallel_size": (int | None, None),
    "enable_attention_dp": (bool, False),
    "scheduler_config": (SchedulerConfig, SchedulerConfig()),
    "kv_connector_config": (KvCacheConnectorConfig | None, None),
}


@dataclass(frozen=True, slots=True)
class Arguments:
    """`pytorch` and `autodeploy` are the models of an LLM's arguments; `exported` is what `llmapi` has of them."""

    pytorch: type[Strict]
    autodeploy: type[Strict]
    exported: dict[str, Any]


def _arguments(cache: type[KvCacheConfig], transceiver: type[CacheTransceiverConfig], *, named: bool) -> Arguments:
    shared: dict[str, Any] = {
        "kv_cache_config": (cache, cache()),
        "cache_transceiver_config": (transceiver | None, None),
        "speculative_config": ((_Discriminated if named else _Unnamed) | None, None),
    }
    pytorch = create_model("TorchLlmArgs", __base__=_LlmArgs, **shared, **_PARALLEL)
    autodeploy = create_model("LlmArgs", __base__=_LlmArgs, **shared)
    speculative = {found.__name__: found for found in (_NAMED if named else _CLASSES).values()}
    if named:
        speculative["Eagle3DecodingConfig"] = _NAMED["Eagle3"]
        speculative["EagleDecodingConfig"] = _NAMED["Eagle"]
    exported = {
        "TorchLlmArgs": pytorch,
        "KvCacheConfig": cache,
        "SchedulerConfig": SchedulerConfig,
        "CacheTransceiverConfig": transceiver,
        "CudaGraphConfig": CudaGraphConfig,
        **speculative,
    }
    return Arguments(pytorch, autodeploy, exported)


ARGUMENTS_1_2 = _arguments(KvCacheConfig, CacheTransceiverConfig, named=False)
ARGUMENTS_1_3 = _arguments(_KvCacheConfig13, _CacheTransceiverConfig13, named=True)
ARGUMENTS_1_3_LATE = _arguments(_KvCacheConfig13, _CacheTransceiverConfigLate, named=True)
ARGUMENTS_MAIN = _arguments(_KvCacheConfigMain, _CacheTransceiverConfigMain, named=True)
