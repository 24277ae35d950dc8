"""Many streams through routers that are lost under them, and what becomes of each: the whole answer, or not."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx2
from support.clients.event_source import EventSource, Refused
from support.clients.resuming import Received

from baton import AsyncClient, Resume
from baton.errors import BatonError
from baton.inference.v1 import generate_pb2, sampling_pb2

_LONGEST_SECONDS = 60.0
_SLOW_SECONDS = 0.02
_STALL_SECONDS = 1.0
# What a client of server-sent events may meet while its router is lost.
_LOST = (httpx2.TransportError, httpx2.TimeoutException, OSError)

Answer = tuple[object, ...]


@dataclass(slots=True)
class Report:
    """What became of the streams. Pauses are the longest gap of each stream that was resumed, in seconds."""

    streams: int = 0
    losses: int = 0
    resumed: int = 0
    recomputed: int | None = 0  # None if the clients are not told
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
        again = "" if self.recomputed is None else f", of them {self.recomputed} computed again"
        return (
            f"{self.losses} losses, {self.streams} streams, {self.tokens} tokens compared: {len(self.failed)} failed, "
            f"{len(self.different)} different; {self.resumed} resumed{again}; "
            f"pause p50 {self.pause(0.5) * 1e3:.0f} ms, p99 {self.pause(0.99) * 1e3:.0f} ms"
        )


def request_kinds(prompt: str, max_tokens: int) -> dict[str, generate_pb2.GenerateRequest]:
    """Requests by name, whose answers differ in how tokens become text and messages; each is the same again."""
    stopping = sampling_pb2.StoppingOptions(max_tokens=max_tokens, ignore_eos=True)
    seeded = sampling_pb2.SamplingParams(temperature=0.8, seed=11)
    kinds = {
        name: generate_pb2.GenerateRequest(prompt=prompt, stopping=stopping, sampling=seeded)
        for name in ("greedy", "seeded", "stop", "three", "logprobs")
    }
    kinds["greedy"].sampling.CopyFrom(sampling_pb2.SamplingParams(temperature=0.0))
    kinds["stop"].stopping.stop.extend(["qz", "th", "e e"])
    kinds["three"].sampling.n = 3
    kinds["logprobs"].response.logprobs = 2
    return kinds


class Streams:
    """Sends requests one after another, `at_once` at a time, until it is told to stop; compares all answers."""

    def __init__(
        self,
        addresses: Sequence[str],
        requests: Mapping[str, generate_pb2.GenerateRequest],
        report: Report,
        stall_seconds: float = _STALL_SECONDS,
    ) -> None:
        self._stall_seconds = stall_seconds
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
        resume = Resume(keep_seconds=20.0, stall_seconds=self._stall_seconds)
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
                    if name == "slow_reader":
                        await asyncio.sleep(_SLOW_SECONDS)
        except BatonError as error:
            if received.handle:
                report.failed.append(f"{name} after {received.tokens}: {error.reason} {error.message}")
            return
        report.tokens += received.tokens
        if _compared(received) != self._expected[name]:
            report.different.append(f"{name}: {_compared(received)} instead of {self._expected[name]}")
        if generation.resumptions:
            report.resumed += 1
            report.recomputed = (report.recomputed or 0) + generation.recomputations
            report.pauses.append(longest)


def _compared(received: Received) -> Answer:
    """The whole answer; of log probabilities the tokens, for a number's last digits depend on its batch."""
    received.logprobs = {index: [(token, 0.0) for token, _ in found] for index, found in received.logprobs.items()}
    return received.whole


class EventSources:
    """The same by OpenAI's API: each client reconnects with the id of its last event, at the next router."""

    def __init__(
        self,
        addresses: Sequence[str],
        bodies: Mapping[str, tuple[str, Mapping[str, object]]],
        stall_seconds: float = _STALL_SECONDS,
    ) -> None:
        self._addresses = addresses
        self._bodies = bodies
        self._expected: dict[str, object] = {}
        self._stall_seconds = stall_seconds
        self.report = Report(recomputed=None)
        self._is_over = False

    async def learn(self) -> None:
        """Learns the undisturbed answers."""
        for name, (path, body) in self._bodies.items():
            self._expected[name] = (await EventSource(path, body).read(self._addresses[0])).choices

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
        while not self._is_over:
            await self._one(chosen.choice(list(self._bodies)), number)

    async def _one(self, name: str, number: int) -> None:
        path, body = self._bodies[name]
        source = EventSource(path, body, headers={"x-baton-keep": "20"}, patience_seconds=self._stall_seconds)
        deadline, router, pause, report = time.monotonic() + _LONGEST_SECONDS, number, 0.05, self.report
        report.streams += 1
        while not source.is_done and not source.errors and time.monotonic() < deadline:
            before = len(source.events)
            try:
                await source.read(self._addresses[router % 2])
            except _LOST:
                router += 1
            except Refused as refused:
                if not source.last_id:
                    return
                if refused.status != 503:
                    report.failed.append(f"{name} after {len(source.events)}: {refused}")
                    return
            pause = 0.05 if len(source.events) > before else min(1.0, 2 * pause)
            if not source.is_done:
                await asyncio.sleep(pause)
        if not source.is_done:
            report.failed.append(f"{name} after {len(source.events)}: {source.errors}")
        elif source.choices != self._expected[name]:
            report.different.append(f"{name}: {source.choices} instead of {self._expected[name]}")
        report.tokens += sum(len(one["text"]) for one in source.choices.values())
        if source.connections > 1:
            report.resumed += 1
            report.pauses.append(source.longest_gap)
