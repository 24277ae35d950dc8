"""The cost of a token alone to the router, without its request: CPU time and function calls while streams only run.

    python -m benchmarks.token_cost [--server grpcio] [--beside CHECKOUT] [--streams 64 256] [--functions 40]

All streams of a load have begun when the measuring begins, and none ends before it does. Tokens come at 30 a second,
those of all streams together. The rest is as in benchmarks/request_cost.py, which measures what requests cost.
"""

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Iterator, Sequence

from baton.inference.v1 import generate_pb2
from benchmarks.processes import cpu_nanoseconds
from benchmarks.request_cost import Router, add_arguments, routers_of
from benchmarks.router_overhead import CONNECTIONS, PACED, prompts

# As many as the workers' context has room for beside the prompt: 16 seconds.
_TOKENS = 480
_SETTLE_SECONDS = 1.0


class Streams:
    """Streams through one router, until the context is left. `tokens` are those that have come."""

    def __init__(self, router: Router, number: int) -> None:
        self._router = router
        self._number = number
        self._begun = 0
        self._all_begun = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.tokens = 0

    async def __aenter__(self) -> "Streams":
        texts = prompts()
        self._tasks = [asyncio.create_task(self._run(index, next(texts))) for index in range(self._number)]
        async with asyncio.timeout(60):
            await self._all_begun.wait()
        await asyncio.sleep(_SETTLE_SECONDS)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, index: int, text: str) -> None:
        request = generate_pb2.GenerateRequest(model=PACED, prompt=text)
        request.stopping.max_tokens = _TOKENS
        has_begun = False
        async for message in self._router.stubs[index % CONNECTIONS].Generate(request):
            if message.HasField("token"):
                self.tokens += len(message.token.token_ids)
                if not has_begun:
                    has_begun = True
                    self._begun += 1
                    if self._begun == self._number:
                        self._all_begun.set()


async def measure(router: Router, number: int, seconds: float, *, is_profiled: bool) -> None:
    """One round of one load."""
    load = (f"{number} streams", "paced")
    async with Streams(router, number) as streams:
        tokens, before, started = streams.tokens, cpu_nanoseconds(router.process.pid), time.perf_counter()
        await asyncio.sleep(seconds)
        took, tokens = cpu_nanoseconds(router.process.pid) - before, streams.tokens - tokens
        _require_steady(streams, number, tokens, time.perf_counter() - started)
        router.microseconds.setdefault(load, []).append(took / 1000 / tokens)
        if is_profiled:
            await router.ask("profile")
            tokens = streams.tokens
            await asyncio.sleep(seconds)
            calls, _, path = (await router.ask("stop")).partition(" ")
            router.calls[load] = int(calls) / (streams.tokens - tokens)
            router.functions[load] = path
            await router.ask("lag")
            await asyncio.sleep(seconds)
            median, late = map(float, (await router.ask("lagged")).split())
            router.lags[load] = f"{median * 1000:.1f} / {late * 1000:.1f}"


def _require_steady(streams: Streams, number: int, tokens: int, seconds: float) -> None:
    if streams.tokens >= number * _TOKENS or tokens < number * 10 * seconds:
        raise SystemExit(f"{tokens} tokens in {seconds:.1f} s are no load of {number} streams that run on")


async def main(arguments: argparse.Namespace) -> str:
    load_before = os.getloadavg()[0]
    async with routers_of(arguments) as routers:
        for round_number in range(arguments.rounds):
            for number in arguments.streams:
                for router in routers if round_number % 2 else reversed(routers):
                    is_profiled = round_number == arguments.rounds - 1
                    await measure(router, number, arguments.seconds, is_profiled=is_profiled)
    return "\n".join([*_rows(routers), f"\nLoad average {load_before:.1f} before and {os.getloadavg()[0]:.1f} after."])


def _rows(routers: Sequence[Router]) -> Iterator[str]:
    costs = "function calls a token | us of CPU a token | least | ratio of each round, median"
    yield f"| load | router | {costs} | loop lag p50 / p99, ms |"
    yield "|---|---|---|---|---|---|---|"
    for load, base in routers[0].microseconds.items():
        for router in routers:
            took = router.microseconds[load]
            ratio = statistics.median(one / other for one, other in zip(took, base, strict=True))
            cells = [" ".join(load), router.name, f"{router.calls[load]:.1f}", f"{statistics.median(took):.1f}"]
            yield "| " + " | ".join([*cells, f"{min(took):.1f}", f"{ratio:.2f}", router.lags[load]]) + " |"


if __name__ == "__main__":
    import uvloop

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0)
    print(uvloop.run(main(parser.parse_args())))
