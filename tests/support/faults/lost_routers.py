"""Many streams through routers that are lost under them, and what becomes of each: the whole answer, or not."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from support.clients.resuming import Received

from baton import AsyncClient, Resume
from baton.errors import BatonError
from baton.inference.v1 import generate_pb2

_LONGEST_SECONDS = 60.0

Answer = tuple[object, ...]


@dataclass(slots=True)
class Report:
    """What became of the streams. Pauses are the longest gap of each stream that was resumed, in seconds."""

    streams: int = 0
    losses: int = 0
    resumed: int = 0
    recomputed: int = 0
    tokens: int = 0
    moves: int = 0
    failed: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)

    def pause(self, share: float) -> float:
        """The pause that this share of the resumed streams did not exceed."""
        ordered = sorted(self.pauses) or [0.0]
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def __str__(self) -> str:
        return (
            f"{self.losses} losses, {self.streams} streams, {self.tokens} tokens compared: {len(self.failed)} failed, "
            f"{len(self.different)} different; {self.resumed} resumed, of them {self.recomputed} computed again; "
            f"pause p50 {self.pause(0.5) * 1e3:.0f} ms, p99 {self.pause(0.99) * 1e3:.0f} ms"
        )


class Streams:
    """Sends requests one after another, `at_once` at a time, until it is told to stop; compares all answers."""

    def __init__(
        self, addresses: Sequence[str], requests: Mapping[str, generate_pb2.GenerateRequest], report: Report
    ) -> None:
        self._addresses = addresses
        self._requests = requests
        self._expected: dict[str, Answer] = {}
        self.report = report
        self._is_over = False

    async def learn(self) -> None:
        """Learns the undisturbed answers."""
        async with AsyncClient(self._addresses[0]) as client:
            for name, request in self._requests.items():
                received = Received(request)
                async with client.generate(request) as events:
                    async for event in events:
                        received.add(event)
                self._expected[name] = _compared(received)

    async def run(self, at_once: int, until: Callable[[], Awaitable[None]]) -> None:
        """Keeps so many streams running until `until` has ended, then waits for the last ones."""
        running = [asyncio.create_task(self._keep_on(number)) for number in range(at_once)]
        try:
            await until()
        finally:
            self._is_over = True
            await asyncio.gather(*running)

    async def _keep_on(self, number: int) -> None:
        chosen = random.Random(number)
        addresses = [*self._addresses[number % 2 :], *self._addresses[: number % 2]]
        resume = Resume(keep_seconds=20.0, stall_seconds=1.0)
        async with AsyncClient(",".join(addresses), resume=resume) as client:
            while not self._is_over:
                await self._one(client, chosen.choice(list(self._requests)))

    async def _one(self, client: AsyncClient, name: str) -> None:
        request, report = self._requests[name], self.report
        received, longest, last = Received(request), 0.0, time.monotonic()
        generation = client.generate(request, timeout_seconds=_LONGEST_SECONDS)
        report.streams += 1
        try:
            async with generation as events:
                async for event in events:
                    now = time.monotonic()
                    longest, last = max(longest, now - last if received.tokens else 0.0), now
                    received.add(event)
                    report.moves += event.finished.moves
        except BatonError as error:
            if received.handle:
                report.failed.append(f"{name} after {received.tokens}: {error.reason} {error.message}")
            return
        report.tokens += received.tokens
        if _compared(received) != self._expected[name]:
            report.different.append(f"{name}: {_compared(received)} instead of {self._expected[name]}")
        if generation.resumptions:
            report.resumed += 1
            report.recomputed += generation.recomputations
            report.pauses.append(longest)


def _compared(received: Received) -> Answer:
    """The whole answer; of log probabilities the tokens, for a number's last digits depend on its batch."""
    received.logprobs = {index: [(token, 0.0) for token, _ in found] for index, found in received.logprobs.items()}
    return received.whole
