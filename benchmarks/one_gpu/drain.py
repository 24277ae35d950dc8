"""Two decode workers on one GPU; one is drained in the middle of its answers, which move to the other one.

    python -m benchmarks.one_gpu.drain [--layers 32] [--streams 16] [--prompt 4000] [--answer 600] [--small]

A Llama of 8B shape with made-up bfloat16 weights, or with --small a little one in float32, whose greedy ids can be
compared whatever else is in a batch. Each round runs the answers undisturbed, all of them on the worker that is then
drained, and then drains it: seconds from the call until every answer has gone on elsewhere, the longest gap between two
tokens of each answer, and what was computed again. Between rounds the drained worker starts again.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

from support.clients.scraping import scrape

from baton import AsyncClient
from baton.inference.v1 import generate_pb2
from benchmarks.gpu_transfer import TINY
from benchmarks.one_gpu.cluster import Cluster, Worker, cluster, embedded
from benchmarks.two_gpus.model import VOCABULARY, big_shape, folder_of, small_shape
from benchmarks.two_gpus.report import quantile, say

_DRAINED, _OTHER = "decode-0", "decode-1"
# Into an answer, when the drain begins: all of them decode by then.
_TOKENS_BEFORE = 100


@dataclass(slots=True)
class Answer:
    """The tokens of an answer, when each came, and what its end says."""

    ids: list[int]
    times: list[float]
    moves: int = 0
    migrations: int = 0
    has_ended: bool = False

    def gaps_ms(self, after: float, before: float) -> list[float]:
        """The gaps that end after one time and begin before another."""
        return [(b - a) * 1e3 for a, b in pairwise(self.times) if b > after and a < before]


class Streams:
    """Sends the same prompts again and again. Workers keep the answers for `keep_seconds`, if there are any."""

    def __init__(
        self, client: AsyncClient, options: argparse.Namespace, vocabulary: int, keep_seconds: int = 0
    ) -> None:
        self.client = client
        self._keep_seconds = keep_seconds
        self._answer = options.answer
        source = Random(1)
        self._prompts = [source.choices(range(3, vocabulary), k=options.prompt) for _ in range(options.streams)]
        self.answers: list[Answer] = []

    async def run(self, salt: str) -> list[Answer]:
        """All answers. The salt keeps them out of what the prefix caches have of earlier ones."""
        self.answers = [Answer([], []) for _ in self._prompts]
        await asyncio.gather(*(self._run(number, salt) for number in range(len(self._prompts))))
        return self.answers

    async def _run(self, number: int, salt: str) -> None:
        request = generate_pb2.GenerateRequest(token_ids=generate_pb2.TokenIds(ids=self._prompts[number]))
        request.sampling.temperature, request.routing.cache_salt = 0.0, salt
        request.stopping.max_tokens, request.stopping.ignore_eos = self._answer, True
        if self._keep_seconds:
            request.response.keep.seconds = self._keep_seconds
        answer = self.answers[number]
        async with self.client.generate(request, timeout_seconds=240) as events:
            async for event in events:
                answer.times += [time.perf_counter()] * len(event.token.token_ids)
                answer.ids += event.token.token_ids
                if event.HasField("finished"):
                    answer.has_ended = True
                    answer.moves, answer.migrations = event.finished.moves, event.finished.migrations

    async def begun(self, tokens: int) -> None:
        """Waits until each answer has so many tokens."""
        while not self.answers or min(len(answer.ids) for answer in self.answers) < tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def gathered(client: AsyncClient, streams: Streams) -> None:
    """Moves all answers to the worker that will be drained. What a worker says that it runs may be of a moment ago."""
    await streams.begun(1)
    while await running(client, _DRAINED) < len(streams.answers):
        if any(answer.has_ended for answer in streams.answers):
            raise SystemExit("an answer has ended before all of them were on one worker: raise --answer")
        await client.move_streams(_OTHER)
        await asyncio.sleep(0.1)


async def running(client: AsyncClient, name: str) -> int:
    """The requests that run on a worker."""
    [found] = [worker for worker in await client.workers() if worker.worker_id == name]
    return int(found.load.running)


async def measure(options: argparse.Namespace, folder: Path, vocabulary: int) -> None:
    """One round, on workers of its own."""
    pool = {} if options.pool_gib is None else {"kv_cache_bytes": int(options.pool_gib * 2**30)}
    engine = embedded(folder, max_sequences=options.streams, **pool)
    workers = [Worker(name, ("decode",), engine) for name in (_DRAINED, _OTHER)]
    began = time.perf_counter()
    async with cluster(workers) as found, AsyncClient(found.address) as client:
        say("cluster", start_s=time.perf_counter() - began)
        streams = Streams(client, options, vocabulary)
        undisturbed = None
        for number in range(2):  # the first one warms up the transport, too: its answers are gathered by moves
            task = asyncio.create_task(streams.run(f"undisturbed {number}"))
            await gathered(client, streams)
            undisturbed = await task
        alone = [gap for answer in undisturbed or () for gap in answer.gaps_ms(answer.times[60], 1e9)]
        task = asyncio.create_task(streams.run("drained"))
        await gathered(client, streams)
        await streams.begun(_TOKENS_BEFORE)
        before = await moved(found, "moved", "returned", "recomputed")
        load = next(worker.load for worker in await client.workers() if worker.worker_id == _DRAINED)
        drained = time.perf_counter()
        ending = asyncio.create_task(client.drain_worker(_DRAINED))
        while not task.done() and await moved(found, "moved", "returned", "recomputed") - before < load.running:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        left = time.perf_counter()
        await ending
        ended = time.perf_counter() - drained
        answers = await task
        say("worker drained", running=load.running, blocks_used=load.blocks_used, call_s=ended)
        again = await moved(found, "recomputed")
        report(answers, undisturbed or [], alone, drained, left, again)


async def moved(found: Cluster, *outcomes: str) -> int:
    """The moves that have ended so, all together."""
    router = await asyncio.to_thread(scrape, found.metrics)
    return int(sum(router.sum("baton_router_moves_total", outcome=outcome) for outcome in outcomes))


def report(
    answers: Sequence[Answer], whole: Sequence[Answer], alone: Sequence[float], began: float, left: float, again: int
) -> None:
    """Prints what came of a drain."""
    gaps = [gap for answer in answers for gap in answer.gaps_ms(began, left)]
    longest = [max(answer.gaps_ms(began, left), default=0.0) for answer in answers]
    different = [a.ids != b.ids for a, b in zip(answers, whole, strict=True)]
    equal = sum(x == y for a, b in zip(answers, whole, strict=True) for x, y in zip(a.ids, b.ids, strict=True))
    say(
        "drain",
        seconds=left - began,
        gap_p50_ms=quantile(gaps, 0.5),
        gap_p99_ms=quantile(gaps, 0.99),
        longest_gap_ms=max(longest),
        longest_gap_of_a_stream_p50_ms=statistics.median(longest),
        before_p50_ms=quantile(alone, 0.5),
        before_p99_ms=quantile(alone, 0.99),
        moves=sum(answer.moves for answer in answers),
        failed_over=sum(answer.migrations for answer in answers),
        computed_again=again,
        different=f"{sum(different)} of {len(answers)}",
        equal_tokens=f"{equal} of {sum(len(answer.ids) for answer in answers)}",
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--streams", type=int, default=4 if TINY else 16)
    parser.add_argument("--prompt", type=int, default=200 if TINY else 4000, help="tokens")
    parser.add_argument("--answer", type=int, default=1500 if TINY else 600, help="tokens")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--pool-gib", type=float, default=0.0625 if TINY else 14.0)
    options = parser.parse_args()
    shape = small_shape() if options.small or TINY else big_shape(options.layers)
    with folder_of(shape) as folder:
        for _ in range(options.rounds):
            await measure(options, folder, 320 if options.small else VOCABULARY)


if __name__ == "__main__":
    asyncio.run(main())
