"""Only on GPUs: an assertion on the device, and engines over two of them. `BATON_TEST_DEVICE=cuda` runs it."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.clients.worker_calls import calls_to, decode_request
from support.engines import vllm
from support.engines.checkpoints import save_qwen3
from support.engines.engine_calls import collect, disaggregated, greedy
from support.eventually import eventually

from baton.errors import EngineFailed, LayoutMismatch
from benchmarks.vllm_gpu.model import shape
from discovery.memory import MemoryRegistry
from runtime.machine import visible_gpus
from services.config import WorkerConfig
from services.engines.base import Engine
from services.engines.context import EngineContext
from services.engines.prompt import Prompt
from services.engines.vllm.config import VllmConfig
from services.engines.vllm.engine import VllmEngine
from services.engines.vllm.factory import open_vllm
from services.server import host_worker

pytestmark = [pytest.mark.requires_vllm, pytest.mark.timeout(600)]

PROMPTS = [
    Prompt(tuple((index * index + 13 * length) % 300 + 10 for index in range(length))) for length in (5, 64, 150)
]


@pytest.fixture(autouse=True)
def on_a_gpu() -> Iterator[None]:
    if not vllm.ON_GPU:
        pytest.skip("needs a GPU, and BATON_TEST_DEVICE=cuda")
    with vllm.installed():
        yield


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_qwen3(tmp_path, vllm.HEAD_DIM)


@asynccontextmanager
async def _engine(checkpoint: Path, role: str, **settings: object) -> AsyncIterator[VllmEngine]:
    arguments = settings.pop("args", {})
    assert isinstance(arguments, dict)
    config = VllmConfig.model_validate({**vllm.settings(checkpoint, arguments), **settings})
    async with open_vllm(config, EngineContext((role,))) as engine:
        assert isinstance(engine, VllmEngine)
        yield engine


async def _answers(engine: Engine, salt: str) -> list[tuple[int, ...]]:
    return [(await collect(engine.decode(replace(one, cache_salt=salt), greedy(12)))).ids for one in PROMPTS]


async def test_an_assertion_on_the_device_ends_its_engine_and_no_other(checkpoint: Path) -> None:
    # Without a tokenizer vLLM does not check ids; Baton does, so this goes past it.
    async with (
        _engine(checkpoint, "decode", guided_decoding=False) as other,
        _engine(checkpoint, "decode", guided_decoding=False) as failing,
    ):
        expected = await _answers(other, "before")
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=2, detokenize=False)
        running = failing.decode(PROMPTS[2], greedy(100))
        async with aclosing(running):
            await anext(running)
            with pytest.raises(Exception, match=r"EngineCore|engine"):
                async for _ in failing.llm.generate({"prompt_token_ids": [10**6] * 8}, params, "x"):
                    pass
            with pytest.raises(EngineFailed):
                async for _ in running:
                    pass
        await eventually(lambda: not failing.healthy)
        assert other.healthy
        assert await _answers(other, "after") == expected


async def test_an_idle_engine_frees_the_gpus_memory_and_the_next_request_wakes_it(checkpoint: Path) -> None:
    import torch

    sleeping = {"sleep_after_seconds": 1.0, "whole_requests": True, "canary_seconds": 2.0, "guided_decoding": False}
    args = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 8 << 30, "gpu_memory_utilization": 0.2}
    async with _engine(checkpoint, "decode", args=args, **sleeping) as engine:
        expected = await _answers(engine, "before")
        free = torch.cuda.mem_get_info()[0]
        for turn in range(3):
            await eventually(lambda: engine.is_asleep)
            await eventually(lambda: torch.cuda.mem_get_info()[0] > free + (5 << 30))
            leaving = asyncio.create_task(collect(engine.decode(PROMPTS[0], greedy(4))))
            await asyncio.sleep(0.05 * turn)
            leaving.cancel()
            began = time.monotonic()
            answers = await asyncio.gather(*(_answers(engine, f"{turn} {number}") for number in range(4)))
            print(f"asleep, then 12 answers after {time.monotonic() - began:.2f} s", flush=True)
            assert answers == [expected] * 4
        assert engine.healthy


async def test_a_model_of_8b_shape_answers_within_three_seconds_of_its_sleep(tmp_path: Path) -> None:
    """With made-up weights. Only its first sleep, which takes memory of the host for them, is long."""
    import torch

    shape(tiny=False).save_pretrained(tmp_path)
    sleeping = {"sleep_after_seconds": 1.0, "whole_requests": True, "canary_seconds": 2.0, "guided_decoding": False}
    args = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.25}
    args |= {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 2048}
    async with _engine(tmp_path, "decode", args=args, **sleeping) as engine:
        expected = await _answers(engine, "before")
        free = torch.cuda.mem_get_info()[0]
        for turn in range(3):
            await eventually(lambda: torch.cuda.mem_get_info()[0] > free + (14 << 30), seconds=60)
            began = time.monotonic()
            stream = engine.decode(replace(PROMPTS[2], cache_salt=f"{turn}"), greedy(4))
            async with aclosing(stream):
                await anext(stream)
                seconds = time.monotonic() - began
            print(f"asleep, then a first token after {seconds:.2f} s", flush=True)
            assert seconds < 3.0
            assert await _answers(engine, f"after {turn}") == expected


async def test_running_out_of_the_device_s_memory_ends_its_engine_and_no_other(tmp_path: Path) -> None:
    """A prompt's log probabilities over a large vocabulary need memory that vLLM has not put aside."""
    import torch

    large = save_qwen3(tmp_path / "large", vllm.HEAD_DIM, vocabulary=128_000)
    small = save_qwen3(tmp_path / "small", vllm.HEAD_DIM)
    async with _engine(small, "decode", guided_decoding=False) as other:
        expected = await _answers(other, "before")
        free = torch.cuda.mem_get_info()[0]
        async with _engine(large, "decode", guided_decoding=False) as failing:
            await collect(failing.decode(PROMPTS[0], greedy(2)))
            rest = torch.empty(torch.cuda.mem_get_info()[0] - (32 << 20), dtype=torch.uint8, device="cuda")
            with pytest.raises(EngineFailed):
                await collect(failing.decode(Prompt((7,) * 240), replace(greedy(2), prompt_logprobs=1)))
            await eventually(lambda: not failing.healthy)
            assert other.healthy
            assert await _answers(other, "after") == expected
            del rest
            torch.cuda.empty_cache()
        await eventually(lambda: torch.cuda.mem_get_info()[0] > free - (256 << 20))


async def test_answers_over_two_gpus_each_are_those_of_one(checkpoint: Path) -> None:
    if len(visible_gpus()) < 2:
        pytest.skip("needs two GPUs")
    async with _engine(checkpoint, "decode") as one:
        whole = await _answers(one, "one")
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(_engine(checkpoint, "prefill", args={"tensor_parallel_size": 2}))
        decode = await stack.enter_async_context(_engine(checkpoint, "decode", args={"tensor_parallel_size": 2}))
        assert await _answers(decode, "two") == whole
        assert [await disaggregated(prefill, decode, each, greedy(12)) for each in PROMPTS] == [
            ids[1:] for ids in whole
        ]


async def test_answers_of_two_pipeline_stages_are_those_of_one_gpu(checkpoint: Path) -> None:
    if len(visible_gpus()) < 2:
        pytest.skip("needs two GPUs")
    async with _engine(checkpoint, "decode") as one:
        whole = await _answers(one, "one")
    async with _engine(checkpoint, "decode", args={"pipeline_parallel_size": 2}, whole_requests=True) as stages:
        assert await _answers(stages, "two") == whole


async def test_each_data_parallel_rank_gives_the_answers_of_one_engine(checkpoint: Path) -> None:
    if len(visible_gpus()) < 2:
        pytest.skip("needs two GPUs")
    async with _engine(checkpoint, "decode") as one:
        whole = await _answers(one, "one")
    async with _engine(checkpoint, "decode", args={"data_parallel_size": 2}) as both:
        assert both.facts.data_parallel_ranks == 2
        for rank in range(2):
            ranked = [replace(each, data_parallel_rank=rank, cache_salt=f"r{rank}") for each in PROMPTS]
            assert [(await collect(both.decode(each, greedy(12)))).ids for each in ranked] == whole


async def test_a_prefix_cache_of_fp8_has_another_digest(checkpoint: Path) -> None:
    async with (
        _engine(checkpoint, "prefill", args={"dtype": "bfloat16"}) as plain,
        _engine(checkpoint, "decode", args={"dtype": "bfloat16", "kv_cache_dtype": "fp8"}) as narrow,
    ):
        assert plain.facts.layout.digest != narrow.facts.layout.digest
        assert plain.facts.layout.block_bytes == 2 * narrow.facts.layout.block_bytes
        assert len((await collect(narrow.decode(PROMPTS[1], greedy(12)))).ids) == 12


async def test_answers_over_two_engines_with_kv_of_fp8_are_those_of_one(checkpoint: Path) -> None:
    args = {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}
    async with _engine(checkpoint, "prefill", args=args) as prefill, _engine(checkpoint, "decode", args=args) as decode:
        whole = await _answers(decode, "one")
        over_two = [await disaggregated(prefill, decode, each, greedy(12)) for each in PROMPTS]
        assert over_two == [ids[1:] for ids in whole]


async def test_a_handoff_of_bfloat16_kv_is_refused_where_kv_is_fp8(checkpoint: Path) -> None:
    async with AsyncExitStack() as stack:
        workers = []
        for role, kind in (("prefill", "auto"), ("decode", "fp8")):
            engine = vllm.settings(checkpoint, {"dtype": "bfloat16", "kv_cache_dtype": kind})
            lease = {"lease_seconds": vllm.LEASE_SECONDS}
            settings = {"worker_id": role, "roles": [role], "engine": engine, "handoff": lease, "drain_seconds": 0}
            config = WorkerConfig.model_validate(settings)
            workers.append(await stack.enter_async_context(host_worker(config, MemoryRegistry("test"))))
        async with calls_to(workers[0].address) as prefill, calls_to(workers[1].address) as decode:
            handoff = await prefill.prefill()
            with pytest.raises(LayoutMismatch):
                await decode.decode(decode_request(handoff))


async def test_answers_over_two_engines_with_weights_of_fp8_are_those_of_one(checkpoint: Path) -> None:
    args = {"dtype": "bfloat16", "quantization": "fp8"}
    async with _engine(checkpoint, "prefill", args=args) as prefill, _engine(checkpoint, "decode", args=args) as decode:
        assert decode.llm.vllm_config.model_config.quantization == "fp8"
        whole = await _answers(decode, "one")
        over_two = [await disaggregated(prefill, decode, each, greedy(12)) for each in PROMPTS]
        assert over_two == [ids[1:] for ids in whole]
