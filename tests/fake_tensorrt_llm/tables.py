"""The behaviour of each version: one table a version, resting on upstream source that was read.

Upstream's repository could not be had whole, so the exact release of most files is not known. 1.2.0 is of files from
the time of its release candidates; 1.3.0rc5 stands for early candidates of 1.3, 1.3.0rc29 for late ones, and
1.3.0rc30 for the main branch after them. No file of a 1.4 was found.
"""

from dataclasses import dataclass

from fake_tensorrt_llm.arguments import ARGUMENTS_1_2, ARGUMENTS_1_3, ARGUMENTS_1_3_LATE, ARGUMENTS_MAIN, Arguments

_HANDOFF = (
    "request_type",
    "first_gen_tokens",
    "ctx_request_id",
    "opaque_state",
    "draft_tokens",
    "multimodal_embedding_handles",
    "multimodal_hashes",
)
_HANDOFF_1_3 = (
    *_HANDOFF,
    "mrope_position_ids_handle",
    "mrope_position_deltas_handle",
    "first_gen_log_probs",
    "first_gen_logits",
    "disagg_request_id",
    "ctx_dp_rank",
    "ctx_info_endpoint",
    "schedule_style",
)
_HANDOFF_1_3_LATE = (*_HANDOFF_1_3, "multimodal_item_runs")
_HANDOFF_MAIN = (*_HANDOFF_1_3_LATE, "ctx_usage", "conversation_id")
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
)
_GENERATE_1_3 = (*_GENERATE, "trace_headers")
_GENERATE_1_3_LATE = (*_GENERATE_1_3, "conversation_params", "priority")
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


@dataclass(frozen=True, slots=True)
class VersionTable:
    """One version. What is False by default came with a later one."""

    version: str
    arguments: Arguments
    handoff: tuple[str, ...]
    generate: tuple[str, ...]
    id_arguments: tuple[str, ...] = ("node_id", "process_id")  # of get_global_disagg_request_id; empty where it is not
    log_request: str = "log_request_metrics_dict"
    overlaps_on_prefill: bool = True  # context_only requests beside the overlap scheduler
    answers_waiting_aborts: bool = False  # a request that is aborted while it waits for its turn ends with an output
    second_cache_manager: bool = (
        False  # KVCacheManagerV2 is chosen: events have text as hashes, one for each layer group
    )
    reads_at_once: bool = True  # statistics and events; else see statistics.IterationResult
    hashes_need_runs: bool = False  # multimodal_hashes without multimodal_item_runs are refused


TABLES = {
    table.version: table
    for table in (
        VersionTable(
            "1.2.0",
            ARGUMENTS_1_2,
            _HANDOFF,
            _GENERATE,
            id_arguments=(),
            log_request="log_metrics_dict",
            overlaps_on_prefill=False,
            reads_at_once=False,
        ),
        VersionTable("1.3.0rc5", ARGUMENTS_1_3, _HANDOFF_1_3, _GENERATE_1_3, id_arguments=("machine_id",)),
        VersionTable("1.3.0rc29", ARGUMENTS_1_3_LATE, _HANDOFF_1_3_LATE, _GENERATE_1_3_LATE),
        VersionTable(
            "1.3.0rc30",
            ARGUMENTS_MAIN,
            _HANDOFF_MAIN,
            _GENERATE_1_3_LATE,
            answers_waiting_aborts=True,
            second_cache_manager=True,
            hashes_need_runs=True,
        ),
    )
}
