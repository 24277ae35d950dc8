"""The cost of `response.keep` for router and worker: CPU for each token of running streams, and memory for each answer.

    python -m benchmarks.kept_cost [--streams 128] [--rounds 5] [--seconds 4] [--answers 2000]

Streams run steadily, 30 tokens a second each, kept ones and others in turn; CPU is that of the router's and of the
workers' process while only tokens come. Memory is the growth of the workers' process for each answer
that is still kept, beyond that of one that is not, of 2 and of 402 tokens: the prefix cache has both. Kept answers have
their prompts beside, of 512 bytes here.
"""

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import psutil

from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc
from benchmarks.processes import child, cpu_nanoseconds, received, run_router
from benchmarks.request_cost import patient_router
from benchmarks.router_overhead import CONNECTIONS, FLAT, PACED, prompts, run_workers
from rpc.channels import open_channel

_TOKENS, _SETTLE_SECONDS = 480, 1.5
_LANES = 32
_FEW, _MANY = 2, 402  # of one token there is no decode to be kept


def _request(model: str, tokens: int, *, is_kept: bool) -> generate_pb2.GenerateRequest:
    request = generate_pb2.GenerateRequest(model=model, prompt=next(_PROMPTS))
    request.stopping.max_tokens, request.stopping.ignore_eos = tokens, True
    if is_kept:
        request.response.keep.seconds = 60
    return request


_PROMPTS = prompts()


class Bench:
    """A router and workers, each in one process."""

    def __init__(self, stubs: Sequence[Any], router: int, workers: int) -> None:
        self._stubs = stubs
        self._processes = {"router": router, "workers": workers}
        self._workers = workers
        self._tokens = 0

    async def answer(self, number: int, request: generate_pb2.GenerateRequest, *, is_stopped: bool = False) -> None:
        """Reads an answer, and counts its tokens."""
        handle = ""
        try:
            async for message in self._stubs[number % len(self._stubs)].Generate(request):
                handle = message.started.resumption.handle or handle
                self._tokens += len(message.token.token_ids)
        finally:
            if handle and is_stopped:
                cancelling = generate_pb2.CancelGenerationRequest(handle=handle)
                await asyncio.shield(self._stubs[0].CancelGeneration(cancelling))

    async def cpu(self, streams: int, seconds: float, *, is_kept: bool) -> dict[str, float]:
        """Microseconds of each process for each token of so many streams."""
        running = [
            asyncio.create_task(self.answer(number, _request(PACED, _TOKENS, is_kept=is_kept), is_stopped=True))
            for number in range(streams)
        ]
        await asyncio.sleep(_SETTLE_SECONDS)
        before, tokens = self._cpu(), self._tokens
        await asyncio.sleep(seconds)
        after, tokens = self._cpu(), self._tokens - tokens
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if tokens < streams * 20 * seconds:
            raise SystemExit(f"{tokens} tokens in {seconds} s are no steady load of {streams} streams")
        return {name: (after[name] - before[name]) / 1e3 / tokens for name in after}

    def _cpu(self) -> dict[str, int]:
        return {name: cpu_nanoseconds(pid) for name, pid in self._processes.items()}

    async def grown_bytes(self, answers: int, tokens: int, *, is_kept: bool) -> float:
        """The growth of the workers' process, in bytes for each of so many answers."""
        process, left = psutil.Process(self._workers), iter(range(answers))
        before = process.memory_info().rss

        async def lane() -> None:
            for number in left:
                await self.answer(number, _request(FLAT, tokens, is_kept=is_kept))

        await asyncio.gather(*(lane() for _ in range(_LANES)))
        return float(process.memory_info().rss - before) / answers


async def main(streams: int, rounds: int, seconds: float, answers: int) -> None:
    """Prints both tables."""
    async with AsyncExitStack() as stack:
        pipe, workers = await stack.enter_async_context(child(run_workers))
        records = await received(pipe)
        router_pipe, router = await stack.enter_async_context(child(run_router, patient_router("http2")))
        router_pipe.send(records)
        address = await received(router_pipe)
        channels = [await stack.enter_async_context(open_channel(address)) for _ in range(CONNECTIONS)]
        bench = Bench([inference_service_pb2_grpc.InferenceServiceStub(one) for one in channels], router, workers)
        await bench.cpu(streams, 1.0, is_kept=True)
        found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        for number in range(rounds):
            for is_kept in (number % 2 == 0, number % 2 == 1):
                found[is_kept].append(await bench.cpu(streams, seconds, is_kept=is_kept))
        for name in ("router", "workers"):
            plain, kept = ([one[name] for one in found[is_kept]] for is_kept in (False, True))
            ratio = statistics.median(one / other for one, other in zip(kept, plain, strict=True))
            print(
                f"{name}: {statistics.median(plain):.2f} us of CPU a token, kept {statistics.median(kept):.2f}, "
                f"median of the rounds' ratios {ratio:.3f} ({min(plain):.2f} and {min(kept):.2f} at least)"
            )
        # What caches and allocators take once is taken.
        await bench.grown_bytes(answers, _MANY, is_kept=False)
        for tokens in (_FEW, _MANY):
            plain, kept_too = [await bench.grown_bytes(answers, tokens, is_kept=is_kept) for is_kept in (False, True)]
            print(
                f"workers: {kept_too - plain:.0f} bytes an answer of {tokens} tokens; "
                f"{plain:.0f} of one that is not kept"
            )


if __name__ == "__main__":
    import uvloop

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--answers", type=int, default=2000)
    uvloop.run(main(**vars(parser.parse_args())))
