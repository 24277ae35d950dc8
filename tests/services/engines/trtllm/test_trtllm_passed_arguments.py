"""The arguments of TensorRT-LLM as they reach its engine, on the stand-in of each version."""

from pathlib import Path

import pytest
from fake_tensorrt_llm.llm import RUNNING
from support.engines import trtllm
from support.engines.engine_calls import collect, greedy

from baton.errors import ConfigError
from services.engines.context import EngineContext
from services.engines.prompt import Prompt
from services.engines.trtllm import factory
from services.engines.trtllm.config import TrtllmConfig
from services.engines.trtllm.factory import open_trtllm

PROMPT = Prompt(tuple(range(10, 60)))
TRANSCEIVER = {"backend": "UCX", "max_tokens_in_buffer": 256, "kv_transfer_timeout_ms": 1000}


async def test_arguments_that_a_version_does_not_take_are_refused_by_its_number(checkpoint: Path) -> None:
    transceiver = {"backend": "UCX", "max_tokens_in_buffer": 256, "kv_transfer_timeout_ms": 1000}
    args = {"cache_transceiver_config": {**transceiver, "transceiver_runtime": "PYTHON"}}
    with trtllm.trtllm("1.2.0"), pytest.raises(ConfigError, match=r"trtllm 1\.2\.0 does not accept"):
        async with trtllm.open_engine(checkpoint, args):
            pass


@pytest.mark.parametrize("policy", ["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"])
async def test_every_argument_that_is_set_reaches_the_engine(version: str, checkpoint: Path, policy: str) -> None:
    plain = {
        "dtype": "bfloat16",
        "trust_remote_code": True,
        "tensor_parallel_size": 2,
        "moe_expert_parallel_size": 2,
        "moe_tensor_parallel_size": 1,
        "gpus_per_node": 2,
        "enable_attention_dp": True,
        "max_batch_size": 6,
        "max_num_tokens": 900,
        "max_seq_len": 256,
        "enable_chunked_prefill": True,
        "disable_overlap_scheduler": True,
        "guided_decoding_backend": "xgrammar",
        "enable_lora": True,
    }
    dynamic = {
        "enable_batch_size_tuning": True,
        "enable_max_num_tokens_tuning": False,
        "dynamic_batch_moving_average_window": 64,
    }
    sections = {
        "scheduler_config": {"capacity_scheduler_policy": policy, "dynamic_batch_config": dynamic},
        "cuda_graph_config": {"enable_padding": True, "batch_sizes": [1, 2]},
        "lora_config": {"lora_dir": ["/lora"], "max_lora_rank": 8},
        "kv_cache_config": {
            "dtype": "fp8",
            "free_gpu_memory_fraction": 0.5,
            "tokens_per_block": 64,
            "host_cache_size": 1 << 30,
            "enable_partial_reuse": False,
        },
        "kv_connector_config": {
            "connector_module": "kvbm",
            "connector_scheduler_class": "A",
            "connector_worker_class": "B",
        },
        "cache_transceiver_config": TRANSCEIVER,
    }
    async with trtllm.open_engine(checkpoint, {**plain, **sections}):
        in_effect = RUNNING[0].args.model_dump()
        assert {name: in_effect[name] for name in plain} == plain
        for name, fields in sections.items():
            assert {field: in_effect[name][field] for field in fields} == fields


async def test_the_sizes_of_all_kinds_of_parallelism_reach_the_engine(
    newest: None, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factory, "visible_gpus", lambda: 8)
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "context_parallel_size": 2}
    async with trtllm.open_engine(checkpoint, sizes):
        assert {name: RUNNING[0].given[name] for name in sizes} == sizes


@pytest.mark.parametrize(
    ("section", "class_name"),
    [
        ({"decoding_type": "NGram", "max_draft_len": 3}, "NGramDecodingConfig"),
        ({"decoding_type": "MTP", "num_nextn_predict_layers": 2}, "MTPDecodingConfig"),
        ({"decoding_type": "Draft_Target", "max_draft_len": 3}, "DraftTargetDecodingConfig"),
        (
            {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model_dir": "/draft"},
            "EagleDecodingConfig",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_every_kind_of_speculative_decoding_reaches_every_version(
    version: str, checkpoint: Path, section: dict[str, object], class_name: str
) -> None:
    async with trtllm.open_engine(checkpoint, {"speculative_config": section}):
        in_effect = RUNNING[0].args.speculative_config
        assert type(in_effect).__name__ == class_name
        given = {name: value for name, value in section.items() if name != "decoding_type"}
        assert {name: getattr(in_effect, name) for name in given} == given


async def test_a_kind_of_speculative_decoding_that_a_version_lacks_is_refused_by_its_number(checkpoint: Path) -> None:
    section = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model_dir": "/draft"}
    with trtllm.trtllm("1.2.0"), pytest.raises(ConfigError, match=r"trtllm 1\.2\.0 has no .* Eagle3"):
        async with trtllm.open_engine(checkpoint, {"speculative_config": section}):
            pass


async def test_a_value_that_the_engine_refuses_is_an_error_of_the_configuration(newest: None, checkpoint: Path) -> None:
    section = {"decoding_type": "Eagle", "max_draft_len": 3}
    with pytest.raises(ConfigError, match=r"does not accept the arguments: .*draft model"):
        async with trtllm.open_engine(checkpoint, {"speculative_config": section}):
            pass


async def test_autodeploy_is_given_only_what_it_takes(newest: None, checkpoint: Path) -> None:
    args = {"tensor_parallel_size": 2, "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}}
    config = trtllm.settings(checkpoint, {**args, "cache_transceiver_config": None}, backend="autodeploy")
    async with open_trtllm(TrtllmConfig.model_validate(config), EngineContext(("decode",))) as engine:
        assert not {"tensor_parallel_size", "scheduler_config"} & set(RUNNING[0].given)
        assert len((await collect(engine.decode(PROMPT, greedy(3)))).ids) == 3
