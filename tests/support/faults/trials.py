"""Runs cells of the matrix on a fleet: sends requests, disturbs them, and checks the results."""

import asyncio
import hashlib
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grpc
from grpc import aio
from support.cluster.fleet import Fleet, Node
from support.faults.cells import HOLD_SECONDS, HOLDS, Cell, Step
from support.faults.outcomes import Outcome, follow
from support.images.pictures import picture

from baton.errors import BatonError
from baton.inference.v1 import generate_pb2 as pb

DEADLINE_SECONDS = 20.0
CUT_SECONDS = 1.5
_PROMPTS = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """The lengths of prompts and answers, which make the steps of a request last, and of a pause.

    Requests on a worker that is paused must end elsewhere before it goes on. They are drawn by seeds unless the engine
    has none.
    """

    long_tokens: int = 1200
    short_tokens: int = 60
    max_tokens: int = 30
    pause_seconds: float = 7.0
    is_greedy: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """A cell's line of the table. `blocks` were in use one lease and a second after the last thing that happened."""

    cell: Cell
    ends: Counter[str]
    slowest_seconds: float
    migrations: int
    blocks: int
    settled_seconds: float
    faults: Sequence[str]

    @property
    def requests(self) -> int:
        return sum(self.ends.values())


class Trials:
    """Runs cells on a fleet, whose workers lease handoffs for `lease_seconds`."""

    def __init__(self, fleet: Fleet, lease_seconds: float, shape: Shape) -> None:
        self._fleet = fleet
        self._lease_seconds = lease_seconds
        self._shape = shape
        self._expected: dict[_Kind, list[int]] = {}
        self._session = session_for("prefill-0", "decode-0")

    async def learn(self, *, images: bool = False) -> None:
        """Runs every prompt once, undisturbed, and keeps the answers as the expected ones."""
        kinds = list(self._kinds(images=images))
        answers = await asyncio.gather(*(self._undisturbed(kind) for kind in kinds))
        self._expected.update(zip(kinds, answers, strict=True))

    async def _undisturbed(self, kind: "_Kind") -> list[int]:
        outcome = Outcome(f"undisturbed-{uuid.uuid4().hex[:6]}")
        await follow(self._fleet.stub.Generate(self._request(kind, outcome.request_id), timeout=60), outcome)
        assert outcome.is_right, outcome
        return outcome.ids

    def _kinds(self, *, images: bool) -> Iterator["_Kind"]:
        for length in (self._shape.long_tokens, self._shape.short_tokens):
            for index in range(_PROMPTS):
                yield _Kind(length, index, has_image=False)
                if images:
                    yield _Kind(length, index, has_image=True)

    async def run(self, cell: Cell, count: int) -> Report:
        """Sends `count` requests, disturbs them at the cell's step, and waits until the fleet has recovered."""
        seconds = HOLD_SECONDS / 2 if cell.disturbance == "deadline" else DEADLINE_SECONDS
        length = self._shape.long_tokens if cell.step == "prefilling" else self._shape.short_tokens
        kinds = [_Kind(length, index % _PROMPTS, cell.has_image) for index in range(count)]
        outcomes, tasks = [], []
        for index, kind in enumerate(kinds):
            outcome = Outcome(f"{cell.target}-{cell.step}-{cell.disturbance}-{index}-{uuid.uuid4().hex[:6]}")
            request = self._request(kind, outcome.request_id)
            call = self._fleet.stub.Generate(request, timeout=seconds, metadata=_metadata(cell.step))
            outcomes.append(outcome)
            tasks.append(asyncio.create_task(follow(call, outcome)))
        await self._reach(cell.step, outcomes)
        await self._disturb(cell, outcomes, tasks)
        await asyncio.gather(*tasks)
        blocks, settled_seconds = await self._settle()
        await self._heal(cell)
        return Report(
            cell=cell,
            ends=Counter(outcome.label for outcome in outcomes),
            slowest_seconds=max(outcome.seconds for outcome in outcomes),
            migrations=sum(outcome.finished.migrations for outcome in outcomes if outcome.finished),
            blocks=blocks,
            settled_seconds=settled_seconds,
            faults=self._faults(cell, seconds, list(zip(kinds, outcomes, strict=True)), blocks),
        )

    def _faults(self, cell: Cell, seconds: float, ended: "Sequence[tuple[_Kind, Outcome]]", blocks: int) -> list[str]:
        found = [
            text
            for kind, outcome in ended
            for text in outcome.faults(self._expected[kind], seconds, router_was_hit=cell.target == "router")
        ]
        if cell.target not in ("router", "client"):
            # There is another worker, and requests do not wait for a hung one.
            found += [f"{one.request_id}: {one.label}: {one.message}" for _, one in ended if not one.is_right]
            late = [one for _, one in ended if one.seconds > self._shape.pause_seconds]
            found += [f"{one.request_id}: took {one.seconds:.1f} s" for one in late]
        if blocks:
            found.append(f"{blocks} blocks were in use a lease and a second later")
        return found

    async def _reach(self, step: Step, outcomes: Sequence[Outcome]) -> None:
        """Waits until the requests are at the step: it lasts twice as long as this, or until tokens have come."""
        if step != "decoding":
            await asyncio.sleep(HOLD_SECONDS / 2)
            return
        until = time.monotonic() + HOLD_SECONDS
        while time.monotonic() < until and any(len(outcome.ids) < 5 for outcome in outcomes):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def _disturb(self, cell: Cell, outcomes: Sequence[Outcome], tasks: "Sequence[asyncio.Task[None]]") -> None:
        match cell.disturbance:
            case "kill":
                self._node(cell).kill()
            case "pause":
                self._node(cell).pause()
                await asyncio.sleep(self._shape.pause_seconds)
                self._node(cell).resume()
            case "cut":
                await self._node(cell).proxy.cut()
                await asyncio.sleep(CUT_SECONDS)
                await self._node(cell).proxy.restore()
            case "freeze":
                self._node(cell).proxy.freeze()
                await asyncio.sleep(self._shape.pause_seconds)
                await self._node(cell).proxy.restore()
            case "leave":
                for task in tasks:
                    task.cancel()
            case "cancel":
                await asyncio.gather(*(self._cancel(outcome.request_id) for outcome in outcomes))
            case "deadline":
                pass

    async def _cancel(self, request_id: str) -> None:
        try:
            await self._fleet.stub.CancelGeneration(pb.CancelGenerationRequest(request_id=request_id), timeout=60)
        except aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:  # It may have ended already.
                raise

    async def _settle(self) -> tuple[int, float]:
        """The blocks still in use a lease and a second from now, and how long it took until there were none."""
        started = time.monotonic()
        while (seconds := time.monotonic() - started) < self._lease_seconds + 1:
            if not await self._blocks_used():
                return 0, seconds
            await asyncio.sleep(0.05)
        return await self._blocks_used(), seconds

    async def _blocks_used(self) -> int:
        alive = [node.name for node in self._fleet.workers if node.is_alive]
        loads = await asyncio.gather(*(self._used(name) for name in alive))
        return sum(loads)

    async def _used(self, name: str) -> int:
        try:
            return (await self._fleet.load(name)).blocks_used
        except BatonError:
            return 1  # It did not report that it has none.

    async def _heal(self, cell: Cell) -> None:
        if cell.disturbance == "kill":
            node = self._node(cell)
            node.start()
            await node.serving()
        await self._fleet.ready()

    def _node(self, cell: Cell) -> Node:
        return self._fleet.nodes[cell.node]

    def _request(self, kind: "_Kind", request_id: str) -> pb.GenerateRequest:
        """A request with a cache salt of its own, so that no cache has any of it."""
        request = pb.GenerateRequest(request_id=request_id)
        if kind.has_image:
            request.prompt = "<image>" + chr(97 + kind.index) * kind.length
            request.media.add(data=picture(width=32 + kind.index), mime_type="image/png")
        else:
            request.token_ids.ids.extend((position * 7 + kind.index * 31) % 200 + 20 for position in range(kind.length))
        if self._shape.is_greedy:
            request.sampling.temperature = 0.0
        else:
            request.sampling.seed = kind.index
        request.stopping.max_tokens = self._shape.max_tokens
        request.stopping.ignore_eos = True
        request.routing.session_key = self._session
        request.routing.cache_salt = uuid.uuid4().hex
        return request


@dataclass(frozen=True, slots=True)
class _Kind:
    """Requests that are alike have the same answer."""

    length: int
    index: int
    has_image: bool


def _metadata(step: Step) -> tuple[tuple[str, str], ...]:
    return (("x-baton-fault", HOLDS[step]),) if step in HOLDS else ()


def session_for(*worker_ids: str) -> str:
    """A session key whose requests go to these workers while they are healthy."""
    for number in range(10_000):
        key = f"session-{number}"
        if all(_affinity(key, mine) > _affinity(key, f"{mine[:-1]}1") for mine in worker_ids):
            return key
    raise AssertionError("no such key")


def _affinity(session_key: str, worker_id: str) -> bytes:
    return hashlib.blake2b(f"{session_key}\0{worker_id}".encode(), digest_size=8).digest()
