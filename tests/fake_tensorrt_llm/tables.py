"""What each supported version accepts: fields and keywords, one table a version."""

from dataclasses import dataclass

_HANDOFF = (
    "request_type",
    "first_gen_tokens",
    "ctx_request_id",
    "opaque_state",
    "draft_tokens",
    "multimodal_embedding_handles",
    "multimodal_hashes",
    "mrope_position_ids_handle",
    "mrope_position_deltas_handle",
    "first_gen_log_probs",
)
_HANDOFF_1_3 = (
    *_HANDOFF,
    "first_gen_logits",
    "disagg_request_id",
    "ctx_dp_rank",
    "ctx_info_endpoint",
    "schedule_style",
)
_GENERATE = (
    "inputs",
    "sampling_params",
    "lora_request",
    "prompt_adapter_request",
    "streaming",
    "kv_cache_retention_config",
    "disaggregated_params",
    "_postproc_params",
    "scheduling_params",
    "cache_salt",
    "trace_headers",
)
_GENERATE_1_3 = (*_GENERATE, "conversation_params", "priority")
SAMPLING = (
    "end_id",
    "pad_id",
    "max_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "n",
    "best_of",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "temperature",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
    "prompt_logprobs",
    "detokenize",
    "add_special_tokens",
    "guided_decoding",
)
LLM = (
    "skip_tokenizer_init",
    "dtype",
    "trust_remote_code",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "moe_expert_parallel_size",
    "moe_tensor_parallel_size",
    "moe_cluster_parallel_size",
    "gpus_per_node",
    "enable_attention_dp",
    "max_batch_size",
    "max_num_tokens",
    "max_seq_len",
    "max_beam_width",
    "enable_chunked_prefill",
    "disable_overlap_scheduler",
    "guided_decoding_backend",
    "kv_cache_config",
    "scheduler_config",
    "cache_transceiver_config",
    "cuda_graph_config",
    "speculative_config",
    "enable_lora",
    "otlp_traces_endpoint",
    "lora_config",
    "return_perf_metrics",
    "enable_iter_perf_stats",
)
_AUTODEPLOY_REFUSES = {
    "scheduler_config",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "moe_cluster_parallel_size",
    "moe_tensor_parallel_size",
    "moe_expert_parallel_size",
    "enable_attention_dp",
}
AUTODEPLOY = tuple(name for name in LLM if name not in _AUTODEPLOY_REFUSES)
SECTIONS = {
    "KvCacheConfig": (
        "enable_block_reuse",
        "enable_partial_reuse",
        "copy_on_partial_reuse",
        "max_tokens",
        "max_attention_window",
        "free_gpu_memory_fraction",
        "host_cache_size",
        "event_buffer_max_size",
        "dtype",
        "tokens_per_block",
    ),
    "SchedulerConfig": ("capacity_scheduler_policy", "context_chunking_policy", "dynamic_batch_config"),
    "CudaGraphConfig": ("enable_padding", "batch_sizes", "max_batch_size"),
    "LoraConfig": ("lora_dir", "lora_target_modules", "max_lora_rank", "max_loras", "max_cpu_loras"),
}
_TRANSCEIVER = ("backend", "max_tokens_in_buffer", "kv_transfer_timeout_ms", "kv_transfer_sender_future_timeout_ms")


@dataclass(frozen=True, slots=True)
class VersionTable:
    """One version."""

    version: str
    handoff: tuple[str, ...]
    generate: tuple[str, ...]
    transceiver: tuple[str, ...]
    id_arguments: tuple[str, ...]  # of get_global_disagg_request_id; empty where there is none
    overlaps_on_prefill: bool
    log_request: str = "log_request_metrics_dict"


TABLES = {
    table.version: table
    for table in (
        VersionTable(
            "1.2.1",
            _HANDOFF,
            _GENERATE,
            _TRANSCEIVER,
            (),
            overlaps_on_prefill=False,
            log_request="log_metrics_dict",
        ),
        VersionTable(
            "1.3.0rc22",
            _HANDOFF_1_3,
            _GENERATE_1_3,
            (*_TRANSCEIVER, "transceiver_runtime", "kv_transfer_poll_interval_ms", "kv_cache_bounce_size_mb"),
            ("node_id", "process_id"),
            overlaps_on_prefill=True,
        ),
        VersionTable(
            "1.4.0rc1",
            (*_HANDOFF_1_3, "ctx_usage"),
            _GENERATE_1_3,
            (*_TRANSCEIVER, "transceiver_runtime", "kv_transfer_poll_interval_ms", "agent_bounce_buffer_enable"),
            ("node_id", "process_id"),
            overlaps_on_prefill=True,
        ),
    )
}
