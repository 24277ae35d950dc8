"""The TensorRT-LLM engine on the stand-in: its life, its failures, and what it refuses."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from fake_tensorrt_llm import llm
from fake_tensorrt_llm.llm import FABRIC, RUNNING
from fake_tensorrt_llm.values import RequestError
from support import trtllm
from support.engine_calls import collect, greedy, until

from rpc.errors import ConfigError, EngineFailed, InvalidRequest, Overloaded, Unsupported
from services.answer import FinishReason
from services.engine import Engine
from services.engines.purpose import Purpose
from services.engines.trtllm.config import TrtllmConfig
from services.engines.trtllm.opening import open_trtllm
from services.kv_elsewhere import MovingKv
from services.prompt import Prompt, Sampling

PROMPT = Prompt(tuple(range(10, 60)))
TRANSCEIVER = {"backend": "UCX", "max_tokens_in_buffer": 256, "kv_transfer_timeout_ms": 1000}


@pytest_asyncio.fixture
async def engine(newest: None, checkpoint: Path) -> AsyncIterator[Engine]:
    async with trtllm.open_engine(checkpoint) as opened:
        yield opened


def opened(checkpoint: Path, *roles: str, **changes: object) -> object:
    config = TrtllmConfig.model_validate({**trtllm.settings(checkpoint), **changes})
    return open_trtllm(config, Purpose(roles or ("prefill", "decode")))


async def test_usage_telemetry_is_off(version: str, checkpoint: Path) -> None:
    async with trtllm.open_engine(checkpoint):
        assert os.environ["TRTLLM_NO_USAGE_STATS"] == "1"


async def test_the_engine_has_run_before_it_is_ready(engine: Engine) -> None:
    assert RUNNING[0].has_run


@pytest.mark.parametrize("number", ["1.1.0", "1.3.0rc5", "1.5.0"])
async def test_another_version_is_refused_by_number(newest: None, checkpoint: Path, number: str) -> None:
    sys.modules["tensorrt_llm"].__version__ = number  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=rf"{number} is not supported"):
        opened(checkpoint)


async def test_arguments_that_a_version_does_not_take_are_refused_by_its_number(checkpoint: Path) -> None:
    transceiver = {"backend": "UCX", "max_tokens_in_buffer": 256, "kv_transfer_timeout_ms": 1000}
    args = {"cache_transceiver_config": {**transceiver, "transceiver_runtime": "PYTHON"}}
    with trtllm.trtllm("1.2.1"), pytest.raises(ConfigError, match=r"trtllm 1\.2\.1 does not accept"):
        async with trtllm.open_engine(checkpoint, args):
            pass


async def test_prefill_without_a_node_id_is_refused_where_ids_are_made_of_it(newest: None, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="node_id"):
        opened(checkpoint, node_id=None)


async def test_every_argument_that_is_set_reaches_the_engine(newest: None, checkpoint: Path) -> None:
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
        "speculative_config": {"decoding_type": "NGram", "max_draft_len": 3},
    }
    sections = {
        "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
        "cuda_graph_config": {"enable_padding": True, "batch_sizes": [1, 2]},
        "lora_config": {"lora_dir": ["/lora"], "max_lora_rank": 8},
        "kv_cache_config": {"dtype": "fp8", "free_gpu_memory_fraction": 0.5, "tokens_per_block": 64},
    }
    async with trtllm.open_engine(checkpoint, {**plain, **sections, "cache_transceiver_config": TRANSCEIVER}):
        given = RUNNING[0].given
        assert {name: given[name] for name in plain} == plain
        for name, fields in {**sections, "cache_transceiver_config": TRANSCEIVER}.items():
            assert type(given[name]).__name__ == "".join(part.title() for part in name.split("_"))
            assert {field: getattr(given[name], field) for field in fields} == fields


async def test_autodeploy_is_given_only_what_it_takes(newest: None, checkpoint: Path) -> None:
    args = {"tensor_parallel_size": 2, "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}}
    config = trtllm.settings(checkpoint, {**args, "cache_transceiver_config": None}, backend="autodeploy")
    async with open_trtllm(TrtllmConfig.model_validate(config), Purpose(("decode",))) as engine:
        assert not {"tensor_parallel_size", "scheduler_config"} & set(RUNNING[0].given)
        assert len((await collect(engine.decode(PROMPT, greedy(3)))).ids) == 3


async def test_a_worker_of_whole_requests_hands_nothing_over(newest: None, checkpoint: Path) -> None:
    config = TrtllmConfig.model_validate(trtllm.settings(checkpoint, {"cache_transceiver_config": None}))
    async with open_trtllm(config, Purpose(("decode",))) as engine:
        with pytest.raises(Unsupported, match="whole requests only"):
            await engine.prefill(PROMPT, greedy(3))


async def test_layouts_differ_where_a_handoff_would_fail(checkpoint: Path) -> None:
    digests = set()
    for number in trtllm.VERSIONS:
        for tokens in (16, 32):
            cache = {"tokens_per_block": tokens, "max_tokens": 640}
            with trtllm.trtllm(number):
                async with trtllm.open_engine(checkpoint, {"kv_cache_config": cache}) as engine:
                    digests.add(engine.facts.layout.digest)
    assert len(digests) == 2 * len(trtllm.VERSIONS)


async def test_routers_are_told_the_limit_in_effect(newest: None, checkpoint: Path) -> None:
    async with trtllm.open_engine(checkpoint, override_engine_args='{"max_seq_len": 128}') as engine:
        assert engine.facts.max_context_tokens == 128


async def test_a_first_token_that_ends_the_request_is_its_end(engine: Engine) -> None:
    first = (await engine.prefill(PROMPT, greedy(9))).first_token
    stopping = replace(greedy(9), stop_token_ids=frozenset({first}))
    held = await engine.prefill(PROMPT, stopping)
    assert (held.first_token, held.finish_reason) == (first, FinishReason.STOP_TOKEN)


async def test_kv_of_a_request_that_ended_at_its_first_token_is_counted_as_long_as_the_engine_holds_it(
    engine: Engine,
) -> None:
    first = (await collect(engine.decode(PROMPT, greedy(1)))).ids[0]
    await engine.prefill(PROMPT, replace(greedy(9), stop_token_ids=frozenset({first})))
    assert len(FABRIC) == 1
    assert engine.load().blocks_held == 4


async def test_one_token_alone_is_not_held_by_the_engine(engine: Engine) -> None:
    assert (await engine.prefill(PROMPT, greedy(1))).finish_reason is FinishReason.LENGTH
    assert not FABRIC


async def test_every_handoff_has_an_id_of_its_own(engine: Engine) -> None:
    states = [await engine.prefill(PROMPT, greedy(9)) for _ in range(3)]
    assert len(FABRIC) == len({kv.engine_state for kv in states if isinstance(kv, MovingKv)}) == 3


async def test_too_many_tokens_that_wait_to_be_fetched_are_refused(newest: None, checkpoint: Path) -> None:
    async with trtllm.open_engine(checkpoint, max_handoff_tokens=99) as engine:
        await engine.prefill(PROMPT, greedy(9))
        with pytest.raises(Overloaded, match="50 tokens wait"):
            await engine.prefill(PROMPT, greedy(9))


async def test_a_prompt_over_one_step_is_refused_without_chunked_prefill(newest: None, checkpoint: Path) -> None:
    async with trtllm.open_engine(checkpoint, {"max_num_tokens": 40}) as engine:
        with pytest.raises(InvalidRequest, match="max_num_tokens, 40"):
            await collect(engine.decode(PROMPT, greedy(9)))


async def test_what_cannot_be_sampled_is_refused(engine: Engine) -> None:
    with pytest.raises(Unsupported, match="logit_bias"):
        await engine.prefill(PROMPT, Sampling(max_tokens=3, logit_bias={5: 1.0}))


async def test_a_fatal_error_fails_what_runs_and_all_that_comes(engine: Engine) -> None:
    async with aclosing(engine.decode(PROMPT, greedy(150))) as stream:
        await anext(stream)
        RUNNING[0].crash = RuntimeError("CUDA error")
        with pytest.raises(EngineFailed, match="CUDA error"):
            await collect(stream)
    # Whatever the engine says of itself from then on.
    RUNNING[0].crash = None
    assert not engine.healthy
    with pytest.raises(EngineFailed, match="CUDA error"):
        await engine.prefill(PROMPT, greedy(2))


async def test_the_failure_of_one_request_leaves_the_engine_well(engine: Engine) -> None:
    RUNNING[0].crash = RequestError("no")
    with pytest.raises(EngineFailed, match="no"):
        await engine.prefill(PROMPT, greedy(2))
    RUNNING[0].crash = None
    assert engine.healthy
    assert len((await collect(engine.decode(PROMPT, greedy(3)))).ids) == 3


async def test_the_engines_own_check_counts(engine: Engine) -> None:
    RUNNING[0].sick = True
    assert not engine.healthy


async def test_work_without_progress_is_a_failure_although_the_engine_says_it_is_well(
    newest: None, checkpoint: Path
) -> None:
    async with trtllm.open_engine(checkpoint, stall_seconds=1.1) as engine:
        RUNNING[0].frozen = True
        stream = engine.decode(PROMPT, greedy(3))
        reading = asyncio.ensure_future(anext(stream))
        await until(lambda: not engine.healthy)
        reading.cancel()


async def test_an_idle_engine_does_not_count_as_stalled(newest: None, checkpoint: Path) -> None:
    async with trtllm.open_engine(checkpoint, stall_seconds=1.1) as engine:
        await collect(engine.decode(PROMPT, greedy(3)))
        await asyncio.sleep(1.2)
        assert engine.healthy


async def test_without_abort_a_request_runs_to_its_end_and_is_counted_until_then(
    newest: None, checkpoint: Path
) -> None:
    async with trtllm.open_engine(checkpoint, abort=False) as engine:
        stream = engine.decode(PROMPT, greedy(150))
        await anext(stream)
        await stream.aclose()
        assert engine.load().running == 1
        await until(lambda: engine.load().running == 0)


@pytest.mark.parametrize(
    ("ours", "theirs"), [("debug", "DEBUG"), ("info", "INFO"), ("warning", "WARNING"), ("error", "ERROR")]
)
async def test_its_log_level_is_ours(
    newest: None, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, ours: str, theirs: str
) -> None:
    monkeypatch.delenv("TLLM_LOG_LEVEL", raising=False)
    config = TrtllmConfig.model_validate(trtllm.settings(checkpoint))
    async with open_trtllm(config, Purpose(log_level=ours)):
        assert os.environ["TLLM_LOG_LEVEL"] == theirs


async def test_a_log_level_in_the_environment_is_stronger(
    newest: None, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLLM_LOG_LEVEL", "TRACE")
    async with trtllm.open_engine(checkpoint):
        assert os.environ["TLLM_LOG_LEVEL"] == "TRACE"


async def test_ids_of_handoffs_are_made_of_the_workers_number(newest: None, checkpoint: Path) -> None:
    config = TrtllmConfig.model_validate(trtllm.settings(checkpoint, node_id=None))
    numbers = iter((3, 700))
    async with open_trtllm(config, Purpose(node=lambda: next(numbers))) as engine:
        await engine.prefill(PROMPT, greedy(9))
        await engine.prefill(PROMPT, greedy(9))
        assert [llm.node_of(number) for number in FABRIC] == [(0, 3), (10, 60)]
