"""The TensorRT-LLM engine on the stand-in: its life cycle, its failures, and refused requests."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from fake_tensorrt_llm import llm
from fake_tensorrt_llm.llm import FABRIC, RUNNING
from fake_tensorrt_llm.values import RequestError
from support.clock import RunningClock
from support.engines import trtllm
from support.engines.engine_calls import collect, greedy
from support.eventually import eventually

from baton.errors import ConfigError, EngineFailed, InvalidRequest, Overloaded, Unavailable, Unsupported
from services.engines.answer import FinishReason
from services.engines.base import Engine, NotOpened
from services.engines.context import EngineContext
from services.engines.kv_transfer import EngineHeldKv
from services.engines.prompt import Prompt, Sampling
from services.engines.trtllm.config import TrtllmConfig
from services.engines.trtllm.engine import TrtllmEngine
from services.engines.trtllm.factory import open_trtllm
from services.engines.trtllm.requests import inflight

PROMPT = Prompt(tuple(range(10, 60)))
TRANSCEIVER = {"backend": "UCX", "max_tokens_in_buffer": 256, "kv_transfer_timeout_ms": 1000}


@pytest_asyncio.fixture
async def engine(newest: None, checkpoint: Path) -> AsyncIterator[Engine]:
    async with trtllm.open_engine(checkpoint) as opened:
        yield opened


def opened(checkpoint: Path, *roles: str, **changes: object) -> object:
    config = TrtllmConfig.model_validate({**trtllm.settings(checkpoint), **changes})
    return open_trtllm(config, EngineContext(roles or ("prefill", "decode")))


async def test_usage_telemetry_is_off(version: str, checkpoint: Path) -> None:
    async with trtllm.open_engine(checkpoint):
        assert os.environ["TRTLLM_NO_USAGE_STATS"] == "1"


async def test_the_log_says_that_the_engine_is_experimental(
    newest: None, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opened(checkpoint)
    assert "trtllm engine is experimental" in capsys.readouterr().out


async def test_the_engine_has_run_before_it_is_ready(engine: Engine) -> None:
    assert RUNNING[0].has_run


@pytest.mark.parametrize("number", ["1.1.0", "1.2.0rc3", "1.4.0rc0"])
async def test_another_version_is_refused_by_number(newest: None, checkpoint: Path, number: str) -> None:
    sys.modules["tensorrt_llm"].__version__ = number  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=rf"{number} is not supported"):
        opened(checkpoint)


async def test_prefill_without_a_node_id_is_refused_where_ids_are_made_of_it(newest: None, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="node_id"):
        opened(checkpoint, node_id=None)


async def test_its_llm_is_its_own_and_nothing_can_be_used_before_it_is_opened(newest: None, checkpoint: Path) -> None:
    engine = opened(checkpoint)
    assert isinstance(engine, TrtllmEngine)
    uses: list[Callable[[], object]] = [lambda: engine.llm, lambda: engine.facts, lambda: engine.healthy, engine.load]
    for use in uses:
        with pytest.raises(NotOpened, match="the engine has not been opened"):
            use()
    with pytest.raises(NotOpened):
        await collect(engine.decode(PROMPT, greedy(2)))
    with pytest.raises(NotOpened):
        await engine.prefill(PROMPT, greedy(2))
    async with engine:
        assert engine.llm is RUNNING[0]
    await engine.__aexit__(None, None, None)


async def test_a_worker_of_whole_requests_hands_nothing_over(newest: None, checkpoint: Path) -> None:
    config = TrtllmConfig.model_validate(
        trtllm.settings(checkpoint, {"cache_transceiver_config": None}, whole_requests=True)
    )
    async with open_trtllm(config, EngineContext(("decode",))) as engine:
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


def ending_at(checkpoint: Path, folder: Path, *eos: int) -> Path:
    """Returns a copy of the checkpoint with these ends of sequence."""
    copied = folder / "copy"
    shutil.copytree(checkpoint, copied)
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": list(eos)}))
    return copied


@pytest.mark.parametrize("is_hidden", [False, True], ids=["with its token", "without"])
async def test_a_prefill_that_ends_at_the_end_of_sequence_holds_nothing(
    newest: None, checkpoint: Path, tmp_path: Path, is_hidden: bool
) -> None:
    async with trtllm.open_engine(checkpoint) as engine:
        first = (await collect(engine.decode(PROMPT, greedy(1)))).ids[0]
    async with trtllm.open_engine(ending_at(checkpoint, tmp_path, first)) as engine:
        RUNNING[0].hides_end_of_prefill = is_hidden
        held = await engine.prefill(PROMPT, Sampling(max_tokens=9, temperature=0.0))
        assert (held.first_token, held.finish_reason) == (first, FinishReason.END_OF_SEQUENCE)
        assert engine.load().blocks_held == 0
        assert not FABRIC


async def test_a_prefill_that_ends_at_another_end_of_sequence_is_an_end_whose_kv_is_held(
    newest: None, checkpoint: Path, tmp_path: Path
) -> None:
    async with trtllm.open_engine(checkpoint) as engine:
        first = (await collect(engine.decode(PROMPT, greedy(1)))).ids[0]
    async with trtllm.open_engine(ending_at(checkpoint, tmp_path, 2, first)) as engine:
        held = await engine.prefill(PROMPT, Sampling(max_tokens=9, temperature=0.0))
        assert held.finish_reason is FinishReason.END_OF_SEQUENCE
        assert engine.load().blocks_held == 4
        assert len(FABRIC) == 1


async def test_a_first_token_that_may_not_end_the_request_yet_does_not(engine: Engine) -> None:
    first = (await collect(engine.decode(PROMPT, greedy(1)))).ids[0]
    stopping = replace(greedy(9), stop_token_ids=frozenset({first}), min_tokens=2)
    assert (await engine.prefill(PROMPT, stopping)).finish_reason is None


async def test_a_stop_token_at_the_last_place_is_the_reason_of_the_end(engine: Engine) -> None:
    ids = (await collect(engine.decode(PROMPT, greedy(4)))).ids
    stopping = replace(greedy(4), stop_token_ids=frozenset({ids[3]}))
    assert (await collect(engine.decode(PROMPT, stopping))).finished.reason is FinishReason.STOP_TOKEN


@pytest.mark.parametrize("change", [{"logprobs": 1}, {"min_p": 0.1}, {"repetition_penalty": 1.1}], ids=str)
async def test_what_speculative_decoding_cannot_sample_is_refused_as_the_clients_fault(
    newest: None, checkpoint: Path, change: dict[str, Any]
) -> None:
    args = {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 3}}
    async with trtllm.open_engine(checkpoint, args) as engine:
        sampling = replace(greedy(4), **change)
        with pytest.raises(Unsupported, match=f"{next(iter(change))} cannot be combined with speculative decoding"):
            await engine.prefill(PROMPT, sampling)
        with pytest.raises(Unsupported, match="speculative decoding"):
            await collect(engine.decode(PROMPT, sampling))
        assert engine.facts.max_logprobs == 0


async def test_requests_of_our_own_are_salted(version: str, checkpoint: Path) -> None:
    async with trtllm.open_engine(checkpoint, canary_seconds=0.05):
        await eventually(lambda: len(RUNNING[0].salts) > 1)
        assert set(RUNNING[0].salts) == {"baton-canary"}


async def test_one_token_alone_is_not_held_by_the_engine(engine: Engine) -> None:
    assert (await engine.prefill(PROMPT, greedy(1))).finish_reason is FinishReason.LENGTH
    assert not FABRIC


async def test_every_handoff_has_an_id_of_its_own(engine: Engine) -> None:
    states = [await engine.prefill(PROMPT, greedy(9)) for _ in range(3)]
    assert len(FABRIC) == len({kv.engine_state for kv in states if isinstance(kv, EngineHeldKv)}) == 3


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
    with pytest.raises(Unsupported, match="bad_words"):
        await engine.prefill(PROMPT, Sampling(max_tokens=3, bad_sequences=((5, 6),)))


async def test_a_fatal_error_fails_what_runs_and_all_that_comes(engine: Engine) -> None:
    async with aclosing(engine.decode(PROMPT, greedy(150))) as stream:
        await anext(stream)
        RUNNING[0].crash = RuntimeError("CUDA error")
        with pytest.raises(EngineFailed, match="CUDA error"):
            await collect(stream)
    # Even if the engine reports that it is healthy again.
    RUNNING[0].crash = None
    assert not engine.healthy
    with pytest.raises(Unavailable, match="CUDA error"):
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
        await eventually(lambda: not engine.healthy)
        reading.cancel()


async def test_an_idle_engine_does_not_count_as_stalled(
    newest: None, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = RunningClock()
    monkeypatch.setattr(inflight, "time", SimpleNamespace(monotonic=clock.now))
    async with trtllm.open_engine(checkpoint, stall_seconds=1.1) as engine:
        await collect(engine.decode(PROMPT, greedy(3)))
        clock.advance(3600)
        assert engine.healthy


async def test_without_abort_a_request_runs_to_its_end_and_is_counted_until_then(
    newest: None, checkpoint: Path
) -> None:
    async with trtllm.open_engine(checkpoint, abort=False) as engine:
        stream = engine.decode(PROMPT, greedy(150))
        await anext(stream)
        await stream.aclose()
        assert engine.load().running == 1
        await eventually(lambda: engine.load().running == 0)


@pytest.mark.parametrize(
    ("ours", "theirs"), [("debug", "DEBUG"), ("info", "INFO"), ("warning", "WARNING"), ("error", "ERROR")]
)
async def test_its_log_level_is_ours(
    newest: None, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, ours: str, theirs: str
) -> None:
    monkeypatch.delenv("TLLM_LOG_LEVEL", raising=False)
    config = TrtllmConfig.model_validate(trtllm.settings(checkpoint))
    async with open_trtllm(config, EngineContext(log_level=ours)):
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
    async with open_trtllm(config, EngineContext(node=lambda: next(numbers))) as engine:
        await engine.prefill(PROMPT, greedy(9))
        await engine.prefill(PROMPT, greedy(9))
        assert [llm.node_of(number) for number in FABRIC] == [(0, 3), (10, 60)]
