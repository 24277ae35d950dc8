"""A model split between two processes: the ids of one process, handoffs with it, and the end of a rank."""

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from pydantic import ValidationError
from support.cluster.processes import Process, process, ranks_of
from support.engines.checkpoints import DEMO
from support.engines.device import DEVICE
from support.engines.embedded import Checkpoint
from support.engines.engine_calls import blocks_used, collect, disaggregated, greedy
from support.eventually import eventually

from baton.errors import ConfigError, EngineFailed
from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.engine import PyTorchEngine

# Ranks load the libraries again, which takes long where many tests share two cores.
pytestmark = pytest.mark.timeout(300)

MAX_TOKENS = 12
READY_SECONDS = 200
GREEDY = replace(greedy(MAX_TOKENS), ignore_eos=False)
SPLIT = {"tensor_parallel_size": 2, "execution": "auto"}
Ids = Callable[[int, int], tuple[int, ...]]

on_cpus = pytest.mark.skipif(DEVICE != "cpu", reason="with gloo, whatever GPUs there are")
on_two_gpus = pytest.mark.skipif(DEVICE != "cuda" or torch.cuda.device_count() < 2, reason="needs two GPUs: make gpu")


@on_cpus
async def test_two_ranks_compute_and_hand_over_like_one_until_one_of_them_ends(
    demo: Checkpoint, random_ids: Ids
) -> None:
    prompts = [random_ids(length, length) for length in (1, 16, 33, 257)]
    whole = [demo.generate(prompt, MAX_TOKENS) for prompt in prompts]
    rest = [ids[1:] for ids in whole]
    async with demo.engine(**SPLIT, max_step_tokens=100) as split, demo.engine(prefix_cache=False) as one:
        together = await asyncio.gather(*(collect(split.decode(Prompt(prompt), GREEDY)) for prompt in prompts))
        assert [each.ids for each in together] == whole
        again = [await collect(split.decode(Prompt(prompt), GREEDY)) for prompt in prompts]
        assert [each.ids for each in again] == whole
        assert again[3].finished.cached_tokens == 256
        assert split.facts.layout == one.facts.layout
        assert [await disaggregated(split, one, Prompt(prompt), GREEDY) for prompt in prompts] == rest
        assert [await disaggregated(one, split, Prompt(prompt), GREEDY) for prompt in prompts] == rest
        drawn = Sampling(max_tokens=MAX_TOKENS, temperature=0.9, top_p=0.9, seed=3, repetition_penalty=1.1)
        asked = Prompt(prompts[2])
        assert (await collect(split.decode(asked, drawn))).ids == (await collect(one.decode(asked, drawn))).ids
        assert blocks_used(split) == blocks_used(one) == 0
        assert split.healthy
        [follower] = ranks_of(os.getpid())
        follower.kill()
        await eventually(lambda: not split.healthy, 60)
        with pytest.raises(EngineFailed, match="rank 1 of the engine has ended"):
            await collect(split.decode(asked, GREEDY))


@on_two_gpus
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no-graphs"])
async def test_two_gpus_compute_the_ids_of_one_until_a_rank_ends_amid_a_step(
    graphs: bool, demo: Checkpoint, random_ids: Ids
) -> None:
    prompts = [random_ids(length, length) for length in range(1, 300, 13)]
    expected = [demo.generate(prompt, MAX_TOKENS) for prompt in prompts]
    async with demo.engine(**SPLIT, cuda_graphs=graphs) as split:
        found = await asyncio.gather(*(collect(split.decode(Prompt(prompt), GREEDY)) for prompt in prompts))
        assert [each.ids for each in found] == expected
        again = [await collect(split.decode(Prompt(prompt), GREEDY)) for prompt in prompts[::6]]
        assert [each.ids for each in again] == expected[::6]
        long = replace(greedy(1000), ignore_eos=True)
        running = [asyncio.create_task(collect(split.decode(Prompt(prompt), long))) for prompt in prompts]
        await eventually(lambda: split.load().running > 0, 60)
        [follower] = ranks_of(os.getpid())
        follower.kill()
        await eventually(lambda: not split.healthy, 60)
        assert all(isinstance(each, EngineFailed) for each in await asyncio.gather(*running, return_exceptions=True))


@on_two_gpus
@pytest.mark.parametrize("lost", ["rank 1", "rank 0", "none"])
async def test_a_worker_on_two_gpus_ends_with_the_code_that_says_why(lost: str, tmp_path: Path) -> None:
    with worker(tmp_path, "engine.device=cuda", "engine.kv_cache_bytes=256MiB", "roles=[decode]") as started:
        await eventually(lambda: "worker ready" in started.log.read_text(), READY_SECONDS)
        [follower] = ranks_of(started.popen.pid)
        match lost:
            case "rank 1":
                follower.kill()
                assert await asyncio.to_thread(started.popen.wait, 60) == 1
            case "rank 0":
                started.kill()
            case "none":
                assert await asyncio.to_thread(started.terminate, 60) == 0
        _, alive = await asyncio.to_thread(psutil.wait_procs, [follower], 60)
        assert not alive


@pytest.mark.slow
@on_cpus
async def test_a_worker_that_loses_a_rank_ends_with_exit_code_1_and_says_why(tmp_path: Path) -> None:
    with worker(tmp_path) as started:
        await eventually(lambda: "worker ready" in started.log.read_text(), READY_SECONDS)
        [follower] = ranks_of(started.popen.pid)
        follower.kill()
        assert await asyncio.to_thread(started.popen.wait, 60) == 1
        assert "a rank of the engine has ended" in started.log.read_text()


@pytest.mark.slow
@on_cpus
async def test_ranks_end_when_rank_0_is_killed_and_not_by_signals_to_the_group(tmp_path: Path) -> None:
    with worker(tmp_path) as started:
        await eventually(lambda: "worker ready" in started.log.read_text(), READY_SECONDS)
        [follower] = ranks_of(started.popen.pid)
        for each in (signal.SIGTERM, signal.SIGINT):
            follower.send_signal(each)
        started.kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, [follower], 60)
        assert not alive


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"execution": "library"}, "tensor_parallel_size: execution must not be library"),
        ({"lora": {"folder": "/tmp"}}, "tensor_parallel_size: a split model does not support lora"),
        ({"speculation": {"kind": "prompt_lookup"}}, "tensor_parallel_size: a split model does not support spec"),
    ],
)
def test_what_a_split_model_cannot_do_is_refused(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        PyTorchConfig.model_validate({"model": DEMO, "tensor_parallel_size": 2, **options})


async def test_heads_that_cannot_be_divided_are_refused_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel_size: the model's 2 key and value heads"):
        async with PyTorchEngine(PyTorchConfig(model=DEMO, device="cpu", tensor_parallel_size=3)):
            pass
    assert not ranks_of(os.getpid())


def worker(folder: Path, *more: str) -> AbstractContextManager[Process]:
    options = ["registry.kind=memory", "metrics_listen=''", f"engine.model={DEMO}", "engine.tensor_parallel_size=2"]
    where = more or ("engine.device=cpu",)
    return process("services", "worker.yaml", [*options, *where, "engine.threads=1"], folder / "worker.log")
