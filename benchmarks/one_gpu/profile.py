"""`baton bench profile` of the embedded engine or of vLLM, and how far what it predicts is from a sweep.

    python -m benchmarks.one_gpu.profile [--engine vllm] [--layers 32] [--output FOLDER]

A worker and a router; the profile goes to FOLDER/profile.json. Then `baton bench sweep` measures the worker behind a
router that assumes this profile, and a simulated worker that computes by it, with the same load. Printed are the
errors of the profile, the router's of its first prompts, and the simulated worker's, against the measured ones.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from random import Random
from typing import Any

from baton import AsyncClient
from baton.inference.v1 import generate_pb2
from benchmarks.gpu_transfer import TINY
from benchmarks.one_gpu.cluster import VLLM_STEP_TOKENS, Cluster, Worker, cluster, embedded, router, vllm_of
from benchmarks.parts import ROOT
from benchmarks.two_gpus.model import big_shape, folder_of
from benchmarks.two_gpus.report import say, table
from engine_protocol.timing_profile import TimingProfile, read_timing_profile

_PROMPTS, _BATCHES, _CONTEXTS = (
    ("16 64 128", "1 4", "64 128") if TINY else ("128 512 1024 2048 4000", "1 4 16 64", "512 2048")
)
_LENGTHS = ((64, 16),) if TINY else ((1024, 128),)
_CONCURRENCY = (1, 4) if TINY else (1, 16, 64)


async def baton(address: str, *arguments: str) -> None:
    """Runs the command, and shows its output on standard error."""
    command = [sys.executable, "-m", "cli", "bench", *arguments, "--address", address]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=sys.stderr)
    if await process.wait():
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")


async def sweep(address: str, isl: int, osl: int, folder: Path, name: str) -> list[dict[str, Any]]:
    """The steps of a sweep, as `baton bench sweep --json` writes them; each has as many requests as it has time for."""
    steps = []
    for number in _CONCURRENCY:
        file = folder / f"{name}-{isl}-{number}.json"
        lengths = ["--isl", str(isl), "--osl", str(osl), "--concurrency", str(number)]
        requests = ["--request-count", str(max(6, 2 * number)), "--warmup", "2", "--seed", str(number)]
        await baton(address, "sweep", *lengths, *requests, "--json", str(file))
        steps += json.loads(file.read_text())["steps"]
    return steps


async def predicted(address: str, length: int) -> float:
    """A router's prediction of the seconds to the first token of a prompt of a length."""
    ids = Random(length).choices(range(32, 127), k=length)
    request = generate_pb2.GenerateRequest(token_ids=generate_pb2.TokenIds(ids=ids))
    async with AsyncClient(address) as client:
        explained = await client.explain_route(request, timeout_seconds=20.0)
    best = explained.candidates[0]
    return float(best.wait_seconds + best.prefill_seconds)


def errors(measured: dict[str, Any], simulated: dict[str, Any]) -> list[float]:
    """The relative errors of a simulated step: TTFT p50, ITL p50, tokens a second."""
    pairs = [(simulated[key]["p50"], measured[key]["p50"]) for key in ("first_token", "token")]
    pairs.append((simulated["output_tokens_per_second"], measured["output_tokens_per_second"]))
    return [a / b - 1 for a, b in pairs]


def worker_of(kind: str, folder: Path) -> Worker:
    """A worker that answers whole requests, with weights that are made up."""
    if kind == "embedded":
        pool = {"kv_cache_bytes": 64 << 20} if TINY else {}
        return Worker(kind, ("prefill", "decode"), embedded(folder, **pool))
    return Worker(kind, ("decode",), vllm_of(folder), module="services")


async def measure(options: argparse.Namespace) -> None:
    """Starts the engine, and measures it."""
    shape = big_shape(options.layers)
    shape.architectures = ["LlamaForCausalLM"]
    with folder_of(shape) as folder:
        async with cluster([worker_of(options.engine, folder)]) as found:
            await measure_behind(found, options.output)


async def measure_behind(found: Cluster, output: Path) -> None:
    """Measures the profile of the worker behind a router, and sweeps; both go to the folder."""
    file = output / "profile.json"
    points = ["--prompts", *_PROMPTS.split(), "--batches", *_BATCHES.split(), "--contexts", *_CONTEXTS.split()]
    await baton(found.address, "profile", str(file), *points, "--repeats", "3", "--answer", "32")
    profile = read_timing_profile(file)
    async with router(found.registered, found.size, settings={"routing.profile": str(file)}) as fresh:
        first = {isl: await predicted(fresh.address, isl) for isl, _ in _LENGTHS}
        for isl, osl in _LENGTHS:
            steps = await sweep(fresh.address, isl, osl, output, "measured")
            prior(profile, isl, osl, first[isl], steps[0])


async def simulate(options: argparse.Namespace) -> None:
    """The same sweeps of a simulated worker that has the profile, and how far they are from the measured ones."""
    step = {"embedded": 4096, "vllm": VLLM_STEP_TOKENS}[options.engine]
    timing = {"profile": str(options.output / "profile.json"), "step_tokens": step}
    engine = {"kind": "simulated", "name": "benchmark", "timing": timing}
    simulated = Worker("simulated", ("prefill", "decode"), {**engine, "num_blocks": 16384}, module="services")
    rows = []
    async with cluster([simulated]) as found:
        for isl, osl in _LENGTHS:
            steps = await sweep(found.address, isl, osl, options.output, "simulated")
            for number, made in zip(_CONCURRENCY, steps, strict=True):
                real = json.loads((options.output / f"measured-{isl}-{number}.json").read_text())["steps"][0]
                rows.append([isl, number, *figures(real), *(f"{error:+.1%}" for error in errors(real, made))])
    table(
        ["prompt", "at once", "TTFT p50 ms", "ITL p50 ms", "tokens/s", "TTFT error", "ITL error", "tokens/s error"],
        rows,
    )


async def run(options: argparse.Namespace) -> None:
    options.output.mkdir(parents=True, exist_ok=True)
    if "measure" in options.only:
        await measure(options)
    if "simulate" in options.only:
        await simulate(options)


def figures(step: dict[str, Any]) -> list[float]:
    """TTFT p50 and ITL p50 in ms, and tokens a second."""
    return [step["first_token"]["p50"] * 1e3, step["token"]["p50"] * 1e3, step["output_tokens_per_second"]]


def prior(profile: TimingProfile, isl: int, osl: int, first: float, alone: dict[str, Any]) -> None:
    """Compares what profile and router predict with one request at a time."""
    ttft, itl = alone["first_token"]["p50"], alone["token"]["p50"]
    context = isl + osl / 2
    say(
        "one at a time",
        prompt=isl,
        ttft_ms=ttft * 1e3,
        profile_error=profile.prefill_seconds(0, isl) / ttft - 1,
        router_before_any_request_error=first / ttft - 1,
        itl_ms=itl * 1e3,
        profile_itl_error=profile.decode_seconds(1, context) / itl - 1,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--output", type=Path, default=Path("profile-output"))
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument("--only", default="measure,simulate")
    options = parser.parse_args()
    asyncio.run(run(options))


if __name__ == "__main__":
    main()
