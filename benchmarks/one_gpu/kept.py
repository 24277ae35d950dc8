"""A worker on a GPU whose memory is kept is killed: how long until it answers, and what becomes of its streams?

    python -m benchmarks.one_gpu.kept [--only restart,kills,cost] [--kills 20] [--streams 64] [--prompt 4000] [--small]
        [--losses SIGKILL] [--keeping kept]

A Llama of 8B shape with made-up bfloat16 weights, or with --small a little one in float32, whose greedy ids can be
compared whatever else is in a batch. `restart` counts from the kill to the end of a call of one token, which begins
then. `kills` runs the streams undisturbed, and then with kills; its gaps are the longest one of each stream from a kill
until all have gone on. With --keeping off, and with --keeping vllm by another engine, nothing is kept, and a supervisor
starts the worker again. With --standby each kill waits until a process stands by. Every kill counts as the keeper's
first. `cost` computes steps of as many sequences by two engines in one process, one of which keeps, in turns.
"""

import argparse
import asyncio
import random
import signal
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil
import torch
from support.clients.scraping import scrape
from support.keeping import keeper_here, workers_of
from support.servers.etcd import free_port
from transformers import LlamaConfig

from baton import AsyncClient
from baton.errors import BatonError
from baton.inference.v1 import cluster_service_pb2, generate_pb2
from benchmarks.gpu_transfer import TINY
from benchmarks.one_gpu.cluster import Worker, cluster, embedded, vllm_of
from benchmarks.one_gpu.drain import Answer, Streams
from benchmarks.two_gpus.model import VOCABULARY, big_shape, folder_of, small_shape
from benchmarks.two_gpus.report import quantile, say
from services.engines.context import KeptMemory
from services.engines.journal.slots import Slot
from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.sequence import Event

_METRICS = f"127.0.0.1:{free_port()}"
_MODULE = "benchmarks.one_gpu.kept_worker"
_SUPERVISED = "benchmarks.one_gpu.supervised"
_KEPT = {"weights": True, "kv": True}
# Room for all streams to their ends, as the embedded engine has by default.
_VLLM = {"kv_cache_memory_bytes": 48 << 30, "gpu_memory_utilization": 0.9, "max_num_seqs": 64}
_COST_TOKENS = 170  # of an answer whose steps are timed
# What comes later than so long after a kill was not on its way.
_UNDER_WAY_SECONDS = 0.2
# A process that stands by needs at least so long.
_STANDBY_SECONDS = 1.5


@asynccontextmanager
async def kept_worker(options: argparse.Namespace, folder: Path) -> AsyncIterator[AsyncClient]:
    """A worker that keeps, or one that is started again without, and a router."""
    began = time.perf_counter()
    worker = _worker(options, folder)
    patient = {"retry.reattach_seconds": options.reattach, "retry.wait_seconds": options.reattach}
    async with cluster([worker], patient) as found, AsyncClient(found.address) as client:
        say("cluster", start_s=time.perf_counter() - began)
        yield client


def _worker(options: argparse.Namespace, folder: Path) -> Worker:
    pool = {"kv_cache_bytes": int(options.pool_gib * 2**30)} if options.pool_gib else {}
    engine = embedded(folder, max_sequences=options.streams, execution="fused", **pool)
    metrics: dict[str, object] = {"metrics_listen": _METRICS}
    if options.keeping == "kept":
        settings = metrics | {"keep_memory": _KEPT | {"standby": options.standby}}
        return Worker("kept", ("prefill", "decode"), engine, _MODULE, settings)
    if options.keeping == "vllm":
        return Worker("kept", ("decode",), vllm_of(folder, **_VLLM), _SUPERVISED, metrics)
    return Worker("kept", ("prefill", "decode"), engine, _SUPERVISED, metrics)


def worker_processes() -> list[psutil.Process]:
    """The worker, and the process that stands by for it, if there is one."""
    parent = next(each for each in psutil.Process().children() if {_MODULE, _SUPERVISED} & {*each.cmdline()})
    return workers_of(parent.pid)


def worker_process() -> psutil.Process:
    """The worker."""
    return worker_processes()[0]


async def first_token(client: AsyncClient) -> None:
    """Repeats a call of one token until it succeeds."""
    while True:
        request = generate_pb2.GenerateRequest(token_ids=generate_pb2.TokenIds(ids=[5, 6, 7]))
        request.stopping.max_tokens = 1
        try:
            async with client.generate(request, timeout_seconds=60) as events:
                async for _ in events:
                    pass
            return
        except BatonError:
            await asyncio.sleep(0.02)


async def restart(client: AsyncClient, options: argparse.Namespace) -> None:
    """Kills an idle worker."""
    await first_token(client)
    seconds = []
    await standby_waits(options)
    for _ in range(options.restarts):
        worker_process().kill()
        began = time.perf_counter()
        await first_token(client)
        seconds.append(time.perf_counter() - began)
        say("restart", first_token_s=seconds[-1], killed_at=(time.time() - seconds[-1]) % 1000)
        await asyncio.sleep(1.0)
        await standby_waits(options)
    say("restarts", median_s=statistics.median(seconds), most_s=max(seconds))


@dataclass(slots=True)
class Outcome:
    """The outcome of streams: the longest gap of each after each kill, and the answers."""

    gaps: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)  # all others, in ms
    kills: int = 0
    failed: int = 0
    compared: int = 0  # tokens, with undisturbed ones
    different: list[int] = field(default_factory=list)  # for each stream that differs, its first such token
    migrations: int = 0
    errors: list[str] = field(default_factory=list)


async def kill_under_streams(client: AsyncClient, options: argparse.Namespace, vocabulary: int) -> None:
    """Kills the worker while all streams decode, in rounds, whose prompts are in the prefix cache."""
    short = argparse.Namespace(**vars(options) | {"answer": options.compared})
    undisturbed = await Streams(client, short, vocabulary, keep_seconds=5).run("killed")
    begun = max(answer.times[0] for answer in undisturbed)
    steady = [gap for answer in undisturbed for gap in answer.gaps_ms(begun, 1e9)]
    say("undisturbed", p50_ms=quantile(steady, 0.5), p99_ms=quantile(steady, 0.99))
    streams, source, outcome = Streams(client, options, vocabulary, keep_seconds=5), random.Random(4), Outcome()
    ends_at = time.monotonic() + options.seconds
    while outcome.kills < options.kills and time.monotonic() < ends_at and not outcome.failed:
        await _round(streams, options, source, outcome, undisturbed, ends_at)
    _report(outcome, options)


def _report(outcome: Outcome, options: argparse.Namespace) -> None:
    say(
        "kills",
        kills=outcome.kills,
        streams=options.streams,
        failed=outcome.failed,
        gap_p50_s=quantile(outcome.gaps, 0.5),
        gap_p99_s=quantile(outcome.gaps, 0.99),
        gap_most_s=max(outcome.gaps, default=0.0),
        steady_p50_ms=quantile(outcome.between, 0.5),
        steady_p99_ms=quantile(outcome.between, 0.99),
        compared=f"{outcome.compared} tokens",
        different=f"{len(outcome.different)} streams, from tokens {outcome.different[:20]}",
        migrations=outcome.migrations,
        errors=str(outcome.errors[:3])[:600],
    )


async def _round(
    streams: Streams,
    options: argparse.Namespace,
    source: random.Random,
    outcome: Outcome,
    expected: Sequence[Answer],
    ends_at: float,
) -> None:
    task = asyncio.create_task(streams.run("killed"))
    await streams.begun(20)
    kills: list[tuple[float, float]] = []  # when, and when all streams had gone on
    while outcome.kills < options.kills and time.monotonic() < ends_at:
        await standby_waits(options)
        await asyncio.sleep(source.uniform(0.3, 1.0))
        if task.done() or any(len(answer.ids) > options.answer - 60 for answer in streams.answers):
            break
        outcome.kills += 1
        kills.append(await _kill(streams, options.losses[(outcome.kills - 1) % len(options.losses)], task))
    if not task.done():
        task.cancel()  # all have gone on after the last kill
    [ended] = await asyncio.gather(task, return_exceptions=True)
    if isinstance(ended, Exception):
        outcome.errors.append(repr(ended))
        outcome.failed += sum(not answer.has_ended for answer in streams.answers)
    for answer, wanted in zip(streams.answers, expected, strict=True):
        _compare(answer, wanted, kills, outcome)


async def _kill(streams: Streams, how: str, running: asyncio.Task[list[Answer]]) -> tuple[float, float]:
    """Returns when it was, and when all streams had gone on."""
    before = await _epoch(streams.client)
    at = await _lose(streams, how)
    back = asyncio.create_task(_back(streams.client, before, at))
    while not running.done() and not _gone_on(streams.answers, at + _UNDER_WAY_SECONDS):  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    took = time.perf_counter() - at
    say("killed", gone_on_s=took, killed_at=(time.time() - took) % 1000)
    await back
    return at, at + took


async def _epoch(client: AsyncClient) -> int:
    """That of the worker's process, as the router knows it; 0 if it is not ready."""
    ready = cluster_service_pb2.WORKER_STATE_READY
    return sum(worker.epoch for worker in await client.workers() if worker.state == ready)


async def _back(client: AsyncClient, before: int, at: float) -> None:
    """Prints the seconds from a kill until the router has the worker's next process, ready."""
    while await _epoch(client) in {0, before}:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    say("back", seconds=time.perf_counter() - at)


async def _lose(streams: Streams, how: str) -> float:
    """Sends the worker a signal, or has it upgraded while the streams decode. Returns when: finding it takes time."""
    if how != "upgrade":
        worker = worker_process()
        processes = [worker, *worker.children(recursive=True)]  # an engine may have processes of its own
        began = time.perf_counter()
        for each in processes:
            each.send_signal(signal.Signals[how])
        return began
    began = time.perf_counter()
    await streams.client.upgrade_worker("kept", timeout_seconds=60)
    await asyncio.sleep(0.5)
    pairs = [pair for answer in streams.answers for pair in pairwise(answer.times) if pair[1] > began]
    say("upgraded", seconds=time.perf_counter() - began - 0.5, gap_most_s=max(b - a for a, b in pairs))
    return began


def _compare(answer: Answer, wanted: Answer, kills: Sequence[tuple[float, float]], outcome: Outcome) -> None:
    pairs = list(pairwise(answer.times))
    for at, gone_on in kills:
        outcome.gaps.append(max((b - a for a, b in pairs if a < gone_on and b > at), default=0.0))
    beside = (b - a for a, b in pairs if not any(a < gone_on and b > at for at, gone_on in kills))
    outcome.between += [seconds * 1e3 for seconds in beside]
    outcome.migrations += answer.migrations
    same = list(zip(answer.ids, wanted.ids, strict=False))
    outcome.compared += len(same)
    first = next((at for at, (x, y) in enumerate(same) if x != y), None)
    if first is not None:
        outcome.different.append(first)


async def standby_waits(options: argparse.Namespace) -> None:
    """Waits until a process that stands by is ready: it computes nothing any more."""
    while options.standby:
        processes = worker_processes()
        if len(processes) > 1 and time.time() - processes[-1].create_time() > _STANDBY_SECONDS:
            before = sum(processes[-1].cpu_times()[:2])
            await asyncio.sleep(0.4)
            if sum(processes[-1].cpu_times()[:2]) - before < 0.02:
                return
        await asyncio.sleep(0.1)


def _gone_on(answers: Sequence[Answer], since: float) -> bool:
    """True if each answer has got a token since then, or has ended."""
    return all(answer.has_ended or answer.times[-1] > since for answer in answers)


async def recovered() -> None:
    """Prints what the newest worker has taken over."""
    found = await asyncio.to_thread(scrape, _METRICS)
    names = {"decodes": "baton_recovered_decodes_total", "blocks": "baton_kv_recovered_blocks_total"}
    parts = {"decodes": ["whole", "cut", "ids", "damaged"], "blocks": ["used", "damaged"]}
    for name, metric in names.items():
        say(name, **{part: found.sum(metric, outcome=part) for part in parts[name]})


def core_of(options: argparse.Namespace, folder: Path, kept: KeptMemory | None) -> EngineCore:
    """An engine, with a pool that has room for all sequences."""
    values: dict[str, object] = dict(embedded(folder, max_sequences=options.streams, execution="fused"))
    values["kv_cache_bytes"] = int(options.pool_gib * 2**30) if options.pool_gib else _room(options)
    return EngineCore(PyTorchConfig.model_validate(values), kept=kept)


def _room(options: argparse.Namespace) -> int:
    """The bytes of all sequences' KV, and some more."""
    shape = shape_of(options)
    token = 2 * shape.num_hidden_layers * shape.num_key_value_heads * (shape.head_dim or 0)
    width = 4 if shape.dtype == torch.float32 else 2
    return int(1.05 * options.streams * (options.prompt + _COST_TOKENS) * token * width) + (64 << 20)


def shape_of(options: argparse.Namespace) -> LlamaConfig:
    """The model's."""
    return small_shape() if options.small or TINY else big_shape(options.layers)


def step_ms(core: EngineCore, options: argparse.Namespace) -> float:
    """Milliseconds of a step in which all sequences decode, on average."""
    events: list[Event] = []
    slots: list[Slot] = []
    tokens = min(options.answer, _COST_TOKENS)
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    sequences = []
    for number in range(options.streams):
        ids = tuple(5 + (number + index) % 200 for index in range(options.prompt))
        prompt = Prompt(ids, cache_salt=str(number))  # whose KV is in the prefix cache from the second turn on
        sequence = core.new_sequence(prompt, sampling, events.append, hold=False)
        if core.journal is not None:
            sequence.slot = core.journal.open_slot(b"x" * 2000, prompt.token_ids)
            assert sequence.slot is not None
            slots.append(sequence.slot)
        core.submit(sequence)
        sequences.append(sequence)
    while not all(sequence.first_token_at for sequence in sequences):
        core.steps.step()
    for _ in range(8):
        core.steps.step()
    taken = []
    while all(sequence.generated < tokens - 4 for sequence in sequences):
        began = time.perf_counter()
        core.steps.step()
        taken.append(time.perf_counter() - began)
    while core.steps.step():
        pass
    for slot in slots:
        assert core.journal is not None
        core.journal.free_slot(slot)
    return statistics.mean(taken) * 1e3


def cost(options: argparse.Namespace, folder: Path) -> None:
    """Compares two engines."""
    import benchmarks.two_gpus.model  # noqa: F401 - made-up weights

    with keeper_here() as keeper, keeper.memory(weights=True, kv=True) as kept, torch.inference_mode():
        keeping = core_of(options, folder, kept)
        plain = core_of(options, folder, None)
        pairs = []
        for turn in range(options.rounds + 1):
            pairs.append((step_ms(plain, options), step_ms(keeping, options)))
            say("a step", turn=turn, plain_ms=pairs[-1][0], kept_ms=pairs[-1][1])
            if turn:  # the first one warms up
                ratio = statistics.median(kept_ms / plain_ms for plain_ms, kept_ms in pairs[1:])
                without, with_it = (statistics.median(each) for each in zip(*pairs[1:], strict=True))
                say("cost", turns=turn, plain_ms=without, kept_ms=with_it, more=f"{ratio - 1:+.2%}")


async def clusters(options: argparse.Namespace, folder: Path, vocabulary: int) -> None:
    """The parts that need processes."""
    async with kept_worker(options, folder) as client:
        if "restart" in options.only:
            await restart(client, options)
        if "kills" in options.only:
            await kill_under_streams(client, options, vocabulary)
            await recovered()


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="restart,kills,cost")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--restarts", type=int, default=5)
    parser.add_argument("--kills", type=int, default=5 if TINY else 20)
    parser.add_argument("--losses", default="SIGKILL", help="signals, or `upgrade`, in turn")
    parser.add_argument("--streams", type=int, default=4 if TINY else 64)
    parser.add_argument("--prompt", type=int, default=200 if TINY else 4000, help="tokens")
    parser.add_argument("--answer", type=int, default=3900, help="tokens")
    parser.add_argument("--keeping", choices=["kept", "off", "vllm"], default="kept")
    parser.add_argument("--standby", action="store_true")
    parser.add_argument("--seconds", type=float, default=100.0, help="the longest time of the rounds with kills")
    parser.add_argument("--reattach", type=float, default=4.0, help="seconds for which the router waits")
    parser.add_argument("--compared", type=int, default=600, help="the first tokens of answers, with undisturbed ones")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--pool-gib", type=float, default=0.0625 if TINY else None)
    options = parser.parse_args()
    options.losses = options.losses.split(",")
    with folder_of(shape_of(options)) as folder:
        if not set(options.only.split(",")).isdisjoint({"restart", "kills"}):
            asyncio.run(clusters(options, folder, 320 if options.small else VOCABULARY))
        if "cost" in options.only:
            cost(options, folder)


if __name__ == "__main__":
    main()
