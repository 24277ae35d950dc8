"""The embedded engine beside vLLM on one GPU, in one call: prefill, the first token of a long prompt, and decode.

    python -m benchmarks.engine_beside_vllm [--rounds 5] [--step-tokens 8192] [--only prefill first "decode 1" ...]

Both read the same checkpoint, an 8B Llama's shape with random bfloat16 weights, made on the GPU and written to memory.
Each has a process of its own and a pool of the same size on the same GPU; while one is measured the other is idle, and
they take turns. vLLM has its defaults for API servers on such a GPU: CUDA graphs, torch.compile, FlashAttention 3, a
prefix cache, steps of 8,192 tokens. `--only profile` runs `baton bench profile` and `sweep` on that vLLM.
`--engines embedded` with BATON_BENCHMARK_TINY=1 tries it on a CPU.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

from benchmarks.gpu_transfer import TINY
from benchmarks.one_gpu.cluster import router, vllm_of
from benchmarks.one_gpu.profile import measure_behind
from benchmarks.parts import ROOT
from runtime.aio import timeout
from runtime.garbage import collect_rarely, exempt_living_objects

POOL_BYTES = (64 << 20) if TINY else (20 << 30)
PROMPTS, PROMPT_TOKENS, LONG, CONTEXT, ANSWER = (4, 64, 100, 96, 16) if TINY else (64, 1024, 4000, 1080, 128)
BATCHES = (1, 4) if TINY else (1, 16, 64)
ENGINES = ("embedded", "vllm")
INDEX = "model.safetensors.index.json"
_START_SECONDS = 300.0
_MEASURE_SECONDS = 120.0
_END_SECONDS = 8.0


class Arrivals(Protocol):
    """An engine that says when each token of a greedy answer came."""

    async def arrivals(self, ids: Sequence[int], tokens: int) -> list[float]: ...


class Embedded:
    """The embedded engine with its default settings, apart from the tokens of a step."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @classmethod
    @asynccontextmanager
    async def open(cls, model: Path, _registry: Path, step_tokens: int) -> AsyncIterator["Embedded"]:
        from services.engines.pytorch.config import PyTorchConfig
        from services.engines.pytorch.engine import PyTorchEngine

        settings = {"device": "cpu", "threads": 1, "execution": "fused"} if TINY else {"device": "cuda"}
        settings |= {"model": model, "kv_cache_bytes": POOL_BYTES, "max_step_tokens": step_tokens}
        async with PyTorchEngine(PyTorchConfig.model_validate(settings)) as engine:
            yield cls(engine)

    async def arrivals(self, ids: Sequence[int], tokens: int) -> list[float]:
        from services.engines.answer import Tokens
        from services.engines.prompt import Prompt, Sampling

        times: list[float] = []
        sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        async with aclosing(self._engine.decode(Prompt(tuple(ids)), sampling)) as stream:
            async for item in stream:
                if isinstance(item, Tokens):
                    times += [time.perf_counter()] * len(item.ids)
        return times


class Vllm:
    """vLLM's AsyncLLM, without a tokenizer: that of a worker of Baton's, past which it is called."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._requests = 0

    @classmethod
    @asynccontextmanager
    async def open(cls, model: Path, registry: Path, step_tokens: int) -> AsyncIterator["Vllm"]:
        from services.config import WorkerConfig
        from services.server import host_worker

        args = {"load_format": "auto", "kv_cache_memory_bytes": POOL_BYTES, "max_num_batched_tokens": step_tokens}
        settings = {"worker_id": "vllm", "roles": ["decode"], "engine": vllm_of(model, **args), "drain_seconds": 0}
        registered = {"kind": "file", "folder": str(registry), "poll_seconds": 0.05}
        config = WorkerConfig.model_validate({**settings, "registry": registered, "server": "http2"})
        async with host_worker(config) as worker:
            engine: Any = worker.engines.engine
            yield cls(engine.llm)

    async def arrivals(self, ids: Sequence[int], tokens: int) -> list[float]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._requests += 1
        params = SamplingParams(
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        times: list[float] = []
        async for output in self._llm.generate({"prompt_token_ids": list(ids)}, params, f"r{self._requests}"):
            times += [time.perf_counter()] * len(output.outputs[0].token_ids)
        return times


def ids_of(length: int, seed: int) -> list[int]:
    """Random ids: no two prompts begin alike."""
    from random import Random

    return Random(seed).choices(range(3, 300), k=length)


async def prefill(engine: Arrivals, seed: int) -> float:
    """Tokens a second of all prompts at once."""
    asked = [ids_of(PROMPT_TOKENS, seed * 1000 + index) for index in range(PROMPTS)]
    began = time.perf_counter()
    await asyncio.gather(*(engine.arrivals(ids, 1) for ids in asked))
    return PROMPTS * PROMPT_TOKENS / (time.perf_counter() - began)


async def first(engine: Arrivals, seed: int) -> float:
    """Milliseconds to the first token of a long prompt, the median of three."""
    taken = []
    for index in range(3):
        asked = ids_of(LONG, seed * 1000 + 900 + index)
        began = time.perf_counter()
        taken.append((await engine.arrivals(asked, 1))[0] - began)
    return statistics.median(taken) * 1e3


async def decode(engine: Arrivals, batch: int, seed: int) -> float:
    """Milliseconds from token to token while so many answers go on, at contexts of about CONTEXT."""
    asked = [ids_of(CONTEXT - ANSWER // 2, seed * 1000 + 100 * batch + index) for index in range(batch)]
    streams = await asyncio.gather(*(engine.arrivals(ids, ANSWER) for ids in asked))
    begin, end = max(times[4] for times in streams), min(times[-1] for times in streams)
    inside = [[each for each in times if begin <= each <= end] for times in streams]
    return statistics.median((times[-1] - times[0]) / (len(times) - 1) * 1e3 for times in inside if len(times) > 2)


MEASURES: dict[str, Callable[[Arrivals, int], Any]] = {
    "prefill": prefill,
    "first": first,
    **{f"decode {batch}": (lambda engine, seed, batch=batch: decode(engine, batch, seed)) for batch in BATCHES},
}


async def serve(kind: str, options: argparse.Namespace, answers: TextIO) -> None:
    """Measures what each line of standard input names; a line of JSON for each answer."""

    def reply(**found: object) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    opened = Embedded.open if kind == "embedded" else Vllm.open
    if kind == "vllm":
        import vllm  # noqa: F401 - which takes as long as writing the checkpoint
    while not (options.model / INDEX).exists():  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(0.2)
    exempt_living_objects()  # as a worker does
    collect_rarely()
    began = time.perf_counter()
    async with opened(options.model, options.registry, options.step_tokens) as engine:
        reply(ready=time.perf_counter() - began)
        while line := await asyncio.to_thread(sys.stdin.readline):
            name, seed = json.loads(line)
            reply(value=await MEASURES[name](engine, seed))


class Process:
    """A process that serves an engine."""

    def __init__(self, kind: str, process: asyncio.subprocess.Process) -> None:
        self.kind = kind
        self._process = process

    @classmethod
    @asynccontextmanager
    async def of(cls, kind: str, options: argparse.Namespace) -> AsyncIterator["Process"]:
        command = [sys.executable, "-m", "benchmarks.engine_beside_vllm", "--serve", kind]
        command += ["--model", str(options.model), "--registry", str(options.registry)]
        command += ["--step-tokens", str(options.step_tokens)]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe)
        try:
            yield cls(kind, process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), _END_SECONDS)
            except TimeoutError:
                process.kill()  # vLLM's own processes see it, and end

    async def read(self, seconds: float) -> dict[str, float]:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), seconds)
        if not line:
            raise RuntimeError(f"{self.kind} has ended")
        found: dict[str, float] = json.loads(line)
        return found

    async def measure(self, name: str, seed: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write((json.dumps([name, seed]) + "\n").encode())
        return (await self.read(_MEASURE_SECONDS))["value"]


async def compare(options: argparse.Namespace) -> None:
    """Measures both engines in turns, each round in the other order, and prints medians and ratios."""
    async with AsyncExitStack() as stack:
        running = [await stack.enter_async_context(Process.of(kind, options)) for kind in options.engines]
        for process in running:
            print(process.kind, "ready after", round((await process.read(_START_SECONDS))["ready"], 1), "s", flush=True)
        for name in options.only:
            if name == "profile":
                await measure_profile(options)
                continue
            found: dict[str, list[float]] = {process.kind: [] for process in running}
            for turn in range(options.rounds + 1):  # the first warms up
                for process in running if turn % 2 else reversed(running):
                    found[process.kind].append(await process.measure(name, turn))
            report(name, {kind: values[1:] for kind, values in found.items()})


async def measure_profile(options: argparse.Namespace) -> None:
    """Measures vLLM's worker behind a router, by `baton bench`."""
    options.profile.mkdir(parents=True, exist_ok=True)
    registry = {"kind": "file", "folder": str(options.registry), "poll_seconds": 0.05}
    async with router({**{f"registry.{key}": value for key, value in registry.items()}, "server": "http2"}, 1) as found:
        await measure_behind(found, options.profile)


def report(name: str, found: dict[str, list[float]]) -> None:
    middle = {kind: statistics.median(values) for kind, values in found.items()}
    line: dict[str, object] = {kind: round(value, 3) for kind, value in middle.items()}
    if len(found) == 2:
        ratios = sorted(a / b for a, b in zip(found["embedded"], found["vllm"], strict=True))
        line |= {"ratio": round(middle["embedded"] / middle["vllm"], 4), "ratios": [round(each, 4) for each in ratios]}
    line["all"] = {kind: [round(value, 2) for value in values] for kind, values in found.items()}
    print(name, json.dumps(line), flush=True)


def write_checkpoint(folder: Path, layers: int) -> None:
    """Writes a configuration and random weights, a file for each layer."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from benchmarks.two_gpus.model import big_shape

    config = big_shape(layers)
    config.architectures = ["LlamaForCausalLM"]
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: each.shape for name, each in AutoModelForCausalLM.from_config(config).state_dict().items()}
    device, dtype = ("cpu", torch.float32) if TINY else ("cuda", torch.bfloat16)
    parts: dict[str, list[str]] = {}
    for name in shapes:
        part = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        parts.setdefault(f"model-{part}.safetensors", []).append(name)

    def write(file: str) -> None:
        made = {
            name: torch.ones(shapes[name], dtype=dtype)
            if name.endswith("norm.weight")
            else (torch.randn(shapes[name], dtype=dtype, device=device) * 0.02).cpu()
            for name in parts[file]
        }
        save_file(made, folder / file, metadata={"format": "pt"})

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(write, parts))
    index = {
        "metadata": {"total_size": 0},
        "weight_map": {name: file for file, names in parts.items() for name in names},
    }
    (folder / INDEX).write_text(json.dumps(index))  # last: whoever waits for it finds all


def folder_for(layers: int) -> str | None:
    """Memory, if it has room for the weights; None for the usual folder of temporary files."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > (layers + 6) << 29 else None


async def run(options: argparse.Namespace) -> None:
    weights, registry = tempfile.TemporaryDirectory(dir=folder_for(options.layers)), tempfile.TemporaryDirectory()
    with weights as folder, registry as registered:
        options.registry = Path(registered)
        async with timeout(options.limit):
            if options.model is None:
                options.model = Path(folder)
                writing = [sys.executable, "-m", "benchmarks.engine_beside_vllm", "--write", folder]
                process = await asyncio.create_subprocess_exec(*writing, "--layers", str(options.layers), cwd=ROOT)
                if await process.wait():
                    raise SystemExit("no checkpoint was written")
            await compare(options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=3 if TINY else 32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-tokens", type=int, default=512 if TINY else 8192, help="both engines' limit of a step")
    parser.add_argument("--only", nargs="+", choices=[*MEASURES, "profile"], default=list(MEASURES))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--serve", choices=ENGINES, help="for the program itself")
    parser.add_argument("--write", type=Path, help="writes the checkpoint only, to this folder")
    parser.add_argument("--model", type=Path, help="a folder that `--write` fills, or has filled")
    parser.add_argument("--registry", type=Path, help="for the program itself")
    parser.add_argument("--profile", type=Path, default=Path("profile-output"), help="where that goes")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for all of it")
    options = parser.parse_args()
    if options.write:
        write_checkpoint(options.write, options.layers)
    elif options.serve:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what the engine prints is no answer
        asyncio.run(serve(options.serve, options, answers))
    else:
        asyncio.run(run(options))


if __name__ == "__main__":
    main()
