"""Many streams through routers that are lost under them, and what becomes of each: the whole answer, or not."""

import asyncio
import random
import time
from bisect import bisect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import httpx2
from support.clients.event_source import EventSource, Refused, connections, is_alive
from support.clients.resuming import Received

from baton import AsyncClient, Resume
from baton.errors import BatonError
from baton.inference.v1 import generate_pb2, sampling_pb2

_LONGEST_SECONDS = 180.0
_SLOW_SECONDS = 0.02
_STALL_SECONDS = 1.0
_REFUSED_SECONDS = 0.5
# What a client of server-sent events may meet while its router is lost.
_LOST = (httpx2.TransportError, httpx2.TimeoutException, OSError)

Answer = tuple[object, ...]


@dataclass(slots=True)
class Report:
    """The outcomes of the streams. Pauses are those of the streams that were resumed, in seconds: see Losses."""

    streams: int = 0
    losses: int = 0
    resumed: int = 0
    recomputed: int | None = 0  # None if the clients are not told
    recomputed_late: int = 0  # of these, answers of which tokens had come
    tokens: int = 0
    moves: int = 0
    failed: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # before they had begun
    different: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)

    def add(self, other: "Report") -> None:
        """Adds those of another run."""
        for name in ("streams", "losses", "resumed", "recomputed_late", "tokens", "moves"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.recomputed = None if other.recomputed is None else (self.recomputed or 0) + other.recomputed
        self.failed += other.failed
        self.refused += other.refused
        self.different += other.different
        self.pauses += other.pauses

    def pause(self, share: float) -> float:
        """The pause that this share of the resumed streams did not exceed."""
        ordered = sorted(self.pauses) or [0.0]
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def __str__(self) -> str:
        again = f", of them {self.recomputed} computed again, {self.recomputed_late} of these after tokens had come"
        again = "" if self.recomputed is None else again
        return (
            f"{self.losses} losses, {self.streams} streams, {self.tokens} tokens compared: {len(self.failed)} failed, "
            f"{len(self.different)} different; {self.resumed} resumed{again}; "
            f"pause p50 {self.pause(0.5) * 1e3:.0f} ms, p99 {self.pause(0.99) * 1e3:.0f} ms"
        )


class Losses:
    """The times at which routers were lost."""

    def __init__(self) -> None:
        self._at: list[float] = []

    def note(self) -> None:
        """A router is lost now."""
        self._at.append(time.monotonic())

    def pause(self, last: float, again: float) -> float:
        """The seconds from the loss to the next token, for a stream that got the last one before it `last`.

        It counts from that token if it came after the loss, or if nothing was lost.
        """
        before = bisect(self._at, again)
        return again - (max(last, self._at[before - 1]) if before else last)


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
    """Sends requests one after another, `at_once` at a time, until it is told to stop; compares all answers.

    Each stream has a client of its own, or, with `programs`, so many clients have all streams.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        requests: Mapping[str, generate_pb2.GenerateRequest],
        report: Report,
        stall_seconds: float = _STALL_SECONDS,
        programs: int = 0,
    ) -> None:
        self._stall_seconds = stall_seconds
        self._programs = programs
        self._addresses = addresses
        self._requests = requests
        self._expected: dict[str, Answer] = {}
        self._opened: AsyncExitStack
        self._clients: list[AsyncClient] = []
        self.report = report
        self.losses = Losses()
        self._is_over = False

    async def learn(self) -> None:
        """Learns the undisturbed answers."""
        async with AsyncClient(self._addresses[0]) as client:
            learnt = await asyncio.gather(*(_whole(client, request) for request in self._requests.values()))
        self._expected = dict(zip(self._requests, learnt, strict=True))

    async def run(self, at_once: int, until: Callable[[], Awaitable[None]]) -> None:
        """Keeps so many streams running until `until` has ended, then waits for the last ones."""
        async with AsyncExitStack() as self._opened:
            await self.balance(at_once)
            running = [asyncio.create_task(self._keep_on(number)) for number in range(at_once)]
            try:
                await until()
            finally:
                self._is_over = True
                await asyncio.gather(*running)

    async def balance(self, at_once: int) -> None:
        """The next streams have new clients, half of them at each router, as those of a balancer are."""
        opened = [self._client(number) for number in range(self._programs or at_once)]
        self._clients = [await self._opened.enter_async_context(client) for client in opened]

    def _client(self, number: int) -> AsyncClient:
        addresses = [*self._addresses[number % 2 :], *self._addresses[: number % 2]]
        return AsyncClient(",".join(addresses), resume=Resume(keep_seconds=20.0, stall_seconds=self._stall_seconds))

    async def _keep_on(self, number: int) -> None:
        chosen = random.Random(number)
        while not self._is_over:
            refused = len(self.report.refused)
            await self._one(self._clients[number % len(self._clients)], chosen.choice(list(self._requests)))
            if len(self.report.refused) > refused:
                await asyncio.sleep(_REFUSED_SECONDS)

    async def _one(self, client: AsyncClient, name: str) -> None:
        request, report = self._requests[name], self.report
        received, pauses, last, resumed, again = Received(request), [0.0], time.monotonic(), 0, 0
        generation = client.generate(request, timeout_seconds=_LONGEST_SECONDS)
        report.streams += 1
        try:
            async with generation as events:
                async for event in events:
                    now = time.monotonic()
                    if generation.resumptions > resumed:
                        resumed = generation.resumptions
                        pauses.append(self.losses.pause(last, now))
                    last = now
                    report.recomputed_late += received.tokens > 0 and generation.recomputations > again
                    again = generation.recomputations
                    received.add(event)
                    report.moves += event.finished.moves
                    if name == "slow_reader":
                        await asyncio.sleep(_SLOW_SECONDS)
        except BatonError as error:
            at = f"after {received.tokens} at {time.strftime('%X')}"
            said = f"{name} {received.handle} {at}: {error.reason} {error.message}"
            (report.failed if received.handle else report.refused).append(said)
            return
        report.tokens += received.tokens
        if _compared(received) != self._expected[name]:
            report.different.append(f"{name}: {_compared(received)} instead of {self._expected[name]}")
        if generation.resumptions:
            report.resumed += 1
            report.recomputed = (report.recomputed or 0) + generation.recomputations
            report.pauses.append(max(pauses))


async def _whole(client: AsyncClient, request: generate_pb2.GenerateRequest) -> Answer:
    received = Received(request)
    async with client.generate(request) as events:
        async for event in events:
            received.add(event)
    return _compared(received)


def _compared(received: Received) -> Answer:
    """The whole answer; of log probabilities the tokens, for a number's last digits depend on its batch."""
    received.logprobs = {index: [(token, 0.0) for token, _ in found] for index, found in received.logprobs.items()}
    return received.whole


class EventSources:
    """The same by OpenAI's API: each client reconnects with the id of its last event, at the next router.

    So does one whose stream is silent while its router does not answer, by the rule of docs/streams.md.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        bodies: Mapping[str, tuple[str, Mapping[str, object]]],
    ) -> None:
        self._addresses = addresses
        self._bodies = bodies
        self._expected: dict[str, object] = {}
        self._http: httpx2.AsyncClient
        self._asked: dict[str, asyncio.Future[bool]] = {}
        self.report = Report(recomputed=None)
        self.losses = Losses()
        self._is_over = False

    async def learn(self) -> None:
        """Learns the undisturbed answers."""
        for name, (path, body) in self._bodies.items():
            self._expected[name] = (await EventSource(path, body).read(self._addresses[0])).choices

    async def run(self, at_once: int, until: Callable[[], Awaitable[None]]) -> None:
        """Keeps so many streams running until `until` has ended, then waits for the last ones."""
        async with connections() as self._http:
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

    async def _is_alive(self, address: str) -> bool:
        """True if a router answers; streams that ask at the same time ask once."""
        if address not in self._asked:
            self._asked[address] = asyncio.ensure_future(is_alive(self._http, address))
            self._asked[address].add_done_callback(lambda _done: self._asked.pop(address, None))
        return await asyncio.shield(self._asked[address])

    async def _one(self, name: str, number: int) -> None:
        path, body = self._bodies[name]
        keep = {"x-baton-keep": "20"}
        source = EventSource(path, body, headers=keep, http=self._http, is_alive=self._is_alive)
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
            report.pauses.append(max((self.losses.pause(*gap) for gap in source.resumed), default=0.0))
