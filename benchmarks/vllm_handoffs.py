"""Handoffs between two vLLM engines: are the answers those of one, also with kills and cancels, and what do they cost?

    PYTHONPATH=.:tests .venv-vllm/bin/python benchmarks/vllm_handoffs.py [--longest 4000] [--at-once 64]

Starts a prefill and a decode engine, each with processes of its own, on a small random Qwen3. The last part kills the
core of the prefill engine. benchmarks/results/vllm.md has a run.
"""

import argparse
import asyncio
import random
import signal
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import psutil
from support.cluster.in_process import PATIENT, Bench, bench
from support.engines import vllm
from support.engines.checkpoints import save_qwen3
from support.engines.engine_calls import collect, disaggregated, greedy
from support.eventually import eventually

from baton.errors import BatonError
from services.config import WorkerConfig
from services.engines.base import Engine
from services.engines.context import EngineConfig, EngineContext
from services.engines.kv_transfer import RemoteKv
from services.engines.prompt import Prompt, Sampling
from services.engines.registry import ENGINES, EngineKind
from services.engines.vllm.config import VllmConfig
from services.engines.vllm.engine import VllmEngine
from services.engines.vllm.factory import open_vllm
from services.handoff.leases import LeaseTable

LENGTHS = (5, 31, 32, 33, 63, 64, 65, 96, 128, 255, 256, 257, 511, 512, 513, 1024)
PROMPTS = 40
TOKENS = 12
TTFT_LENGTHS = (100, 500, 1500)
KILL_AFTER = 0.75  # of the requests
SAMPLED = Sampling(max_tokens=TOKENS, temperature=0.9, seed=5, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The longest prompt, the requests at a time, the number of them with kills and cancels, and the pairs of TTFT."""

    longest: int
    at_once: int
    requests: int
    pairs: int

    @property
    def arguments(self) -> dict[str, object]:
        """Of the engines: a pool for all prompts that run at a time."""
        context = self.longest + 500
        blocks = max(200, self.at_once * context // vllm.BLOCK_TOKENS)
        sequences = max(8, self.at_once)
        batch = {"max_num_seqs": sequences, "max_num_batched_tokens": max(2048, context)}
        return {"max_model_len": context, "num_gpu_blocks_override": blocks, **batch}


async def main(sizes: Sizes) -> None:
    """Prints one line for each part."""
    with TemporaryDirectory() as folder:
        checkpoint = save_qwen3(Path(folder), vllm.HEAD_DIM, max(2048, sizes.longest + 500))
        async with AsyncExitStack() as stack:
            prefill = await stack.enter_async_context(_open(checkpoint, "prefill", sizes))
            decode = await stack.enter_async_context(_open(checkpoint, "decode", sizes))
            await added_ttft(prefill, decode, sizes.pairs)
            for name, sampling in (("seeded", SAMPLED), ("greedy", greedy(TOKENS))):
                await equality(name, sampling, prefill, decode, sizes)
            await cancelled_prefills(prefill)
            await kills_and_cancels(prefill, decode, sizes)


def _open(checkpoint: Path, role: str, sizes: Sizes) -> Any:
    settings = vllm.settings(checkpoint, sizes.arguments, {"seconds": 60.0, "fetch_seconds": 50.0})
    return open_vllm(VllmConfig.model_validate(settings), EngineContext((role,)))


async def equality(name: str, sampling: Sampling, prefill: Engine, decode: Engine, sizes: Sizes) -> None:
    """Prompts over two engines, alone and several at a time, against the decode engine's own answers."""
    draw = random.Random(3)
    lengths = [*LENGTHS, sizes.longest]
    lengths += [draw.randrange(5, sizes.longest) for _ in range(PROMPTS - len(lengths))]
    prompts = [Prompt(tuple(draw.randrange(3, 300) for _ in range(length))) for length in lengths]
    whole = [(await collect(decode.decode(replace(one, cache_salt=f"{name} one"), sampling))).ids for one in prompts]
    alone = [await disaggregated(prefill, decode, one, sampling) for one in prompts]
    _report(f"{name}, alone", alone, whole)
    slots = asyncio.Semaphore(sizes.at_once)

    async def crowded(one: Prompt) -> tuple[int, ...]:
        async with slots:
            return await disaggregated(prefill, decode, replace(one, cache_salt=f"{name} crowd"), sampling)

    _report(f"{name}, {sizes.at_once} at a time", await asyncio.gather(*map(crowded, prompts)), whole)


def _report(name: str, found: Sequence[tuple[int, ...]], whole: Sequence[tuple[int, ...]]) -> None:
    equal = sum(rest == ids[1:] for rest, ids in zip(found, whole, strict=True))
    print(f"equal answers, {name}: {equal} of {len(whole)}", flush=True)


async def added_ttft(prefill: VllmEngine, decode: VllmEngine, pairs: int) -> None:
    """The time to the first confirmed token, in pairs with vLLM's own two-step flow, whose order changes with each."""
    draw = random.Random(9)
    async with LeaseTable(lease_seconds=600) as leases:
        for length in TTFT_LENGTHS:
            alone: list[float] = []
            behind: list[float] = []
            for run in range(pairs + 2):
                prompts = [tuple(draw.randrange(3, 300) for _ in range(length)) for _ in range(2)]
                if run % 2:
                    taken = await _two_steps(prefill, decode, prompts[0], f"{length}-{run}")
                    leased = await _leased(prefill, decode, Prompt(prompts[1]), leases)
                else:
                    leased = await _leased(prefill, decode, Prompt(prompts[1]), leases)
                    taken = await _two_steps(prefill, decode, prompts[0], f"{length}-{run}")
                if run >= 2:
                    alone.append(taken)
                    behind.append(leased)
            print(f"TTFT of {length} tokens: {_compared(alone, behind)}", flush=True)


def _compared(alone: Sequence[float], behind: Sequence[float]) -> str:
    first, second = statistics.median(alone), statistics.median(behind)
    ratios = sorted(ours / theirs for theirs, ours in zip(alone, behind, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4)
    best = f"best {min(alone) * 1e3:.1f} and {min(behind) * 1e3:.1f} ms ({min(behind) / min(alone) - 1:+.1%})"
    paired = f"median of {len(ratios)} paired ratios {middle:.3f} (quartiles {low:.3f} to {high:.3f})"
    return f"{paired}; medians: vLLM {first * 1e3:.1f} ms, Baton {second * 1e3:.1f} ms; {best}"


async def _two_steps(prefill: VllmEngine, decode: VllmEngine, ids: Sequence[int], name: str) -> float:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    def params(most: int, transfer: dict[str, Any]) -> Any:
        return SamplingParams(
            max_tokens=most,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"kv_transfer_params": transfer},
        )

    inputs: Any = {"prompt_token_ids": list(ids)}
    started = time.perf_counter()
    async for output in prefill.llm.generate(inputs, params(1, {"do_remote_decode": True}), f"p{name}"):
        transfer = output.kv_transfer_params
    answer = decode.llm.generate(inputs, params(3, transfer), f"d{name}")
    await anext(answer)
    seconds = time.perf_counter() - started
    async for _ in answer:
        pass
    return seconds


async def _leased(prefill: VllmEngine, decode: VllmEngine, prompt: Prompt, leases: LeaseTable) -> float:
    started = time.perf_counter()
    held = await prefill.prefill(prompt, greedy(3))
    lease = leases.hold("r", held, prefill.facts.layout.digest)
    source = RemoteKv(replace(prompt, emitted=(held.first_token,)), held.num_tokens, held.engine_state)
    stream = await decode.decode_remote(source, greedy(3))
    leases.fetched(lease.handoff_id)
    assert (await leases.release(lease.handoff_id)).still_valid
    seconds = time.perf_counter() - started
    await collect(stream)
    return seconds


async def cancelled_prefills(prefill: VllmEngine) -> None:
    """The time to the first token of a request behind ten long prefills that are cancelled."""
    prompts = [Prompt(tuple((number + index * 7) % 300 + 5 for index in range(1900))) for number in range(10)]
    tasks = [asyncio.create_task(prefill.prefill(one, greedy(2))) for one in prompts]
    await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    started = time.perf_counter()
    held = await prefill.prefill(Prompt(tuple(range(5, 55))), greedy(2))
    seconds = time.perf_counter() - started
    await held.release()
    await asyncio.gather(*tasks, return_exceptions=True)
    print(f"TTFT of 50 tokens behind 10 cancelled prefills of 1900: {seconds * 1e3:.0f} ms", flush=True)


@dataclass
class Outcomes:
    """The outcomes of the requests."""

    right: int = 0
    wrong: int = 0
    cancelled: int = 0
    over_two: int = 0
    errors: list[str] = field(default_factory=list)


class OpenedConfig(EngineConfig):
    """The engine of a worker that was opened before."""

    kind: Literal["vllm-opened"] = "vllm-opened"


async def kills_and_cancels(prefill: VllmEngine, decode: VllmEngine, sizes: Sizes) -> None:
    """Requests through workers and a router, a third of them cancelled; then the prefill engine's core is killed."""
    engines = {"prefill": prefill, "decode": decode}

    @asynccontextmanager
    async def opened(role: str) -> AsyncIterator[Engine]:
        yield engines[role]

    ENGINES["vllm-opened"] = EngineKind(OpenedConfig, lambda _, context: opened(context.roles[0]))
    async with bench(_worker("prefill"), _worker("decode"), router=PATIENT) as running:
        whole = [await _answer(running, number, routing={"topology": "TOPOLOGY_AGGREGATED"}) for number in range(25)]
        outcomes, slots, draw = Outcomes(), asyncio.Semaphore(sizes.at_once), random.Random(4)

        async def request(number: int) -> None:
            async with slots:
                if number == int(KILL_AFTER * sizes.requests):
                    _kill_first_core()
                if draw.random() < 1 / 3:
                    await _cancelled(running, number % 25, draw.random())
                    outcomes.cancelled += 1
                    return
                try:
                    await _checked(running, number % 25, whole, outcomes)
                except BatonError as error:
                    outcomes.errors.append(f"{number}: {type(error).__name__} {error}")

        await asyncio.gather(*map(request, range(sizes.requests)))
        print(f"{sizes.requests} requests: {outcomes}; the prefill engine is healthy: {prefill.healthy}", flush=True)
        with suppress(AssertionError):
            await eventually(lambda: decode.load().blocks_used == 0)
        print(f"left on the decode engine: {decode.load()}", flush=True)


async def _checked(running: Bench, number: int, whole: Sequence[list[int]], outcomes: Outcomes) -> None:
    stream = await running.generate(**_request(number, TOKENS))
    if stream.token_ids == whole[number]:
        outcomes.right += 1
    else:
        outcomes.wrong += 1
    outcomes.over_two += bool(stream.placed[0])


async def _cancelled(running: Bench, number: int, seconds: float) -> None:
    task = asyncio.create_task(running.generate(**_request(number, 60)))
    await asyncio.wait([task], timeout=seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _answer(running: Bench, number: int, **fields: object) -> list[int]:
    return (await running.generate(**_request(number, TOKENS), **fields)).token_ids


def _request(number: int, max_tokens: int) -> dict[str, object]:
    length = 5 + (number * 37) % 700
    ids = [(number * 7 + index * index * (number + 1)) % 300 + 5 for index in range(length)]
    sampling = {"temperature": 0.8 if number % 2 else 0.0, "seed": 7 + number}
    return {
        "token_ids": {"ids": ids},
        "sampling": sampling,
        "stopping": {"max_tokens": max_tokens, "ignore_eos": True},
    }


def _worker(role: str) -> WorkerConfig:
    lease = {"lease_seconds": 50.0}
    settings = {"worker_id": role, "roles": [role], "engine": OpenedConfig(), "handoff": lease, "drain_seconds": 0}
    return WorkerConfig.model_validate(settings)


def _kill_first_core() -> None:
    """The core that was started first is the prefill engine's."""
    children = psutil.Process().children()
    cores = [child for child in children if any("EngineCore" in word for word in child.cmdline())]
    min(cores, key=lambda core: core.create_time()).send_signal(signal.SIGKILL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=int, default=1500, help="tokens of the longest prompt")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=40, help="of times to the first token, for each length")
    chosen = parser.parse_args()
    asyncio.run(main(Sizes(chosen.longest, chosen.at_once, chosen.requests, chosen.pairs)))
