"""A steady load on a fleet. Its client repeats a request that failed before its first event."""

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from support.cluster.fleet import Fleet
from support.faults.outcomes import Outcome, follow

from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from rpc.channels import open_channel

_DEADLINE_SECONDS = 30.0
_ATTEMPTS = 5


@dataclass(slots=True)
class Load:
    """The results so far. `wrong` are requests that failed or got other tokens than an undisturbed one."""

    expected: Sequence[int]
    right: int = 0
    migrations: int = 0
    retries: int = 0
    wrong: list[str] = field(default_factory=list)

    def count(self, outcome: Outcome) -> None:
        """Notes the end of a request."""
        wrong = outcome.faults(self.expected, _DEADLINE_SECONDS, router_was_hit=False)
        if not outcome.is_right:
            wrong.append(f"{outcome.request_id}: {outcome.label} after {len(outcome.ids)} tokens: {outcome.message}")
        self.wrong += wrong
        if not wrong and outcome.finished:
            self.right += 1
            self.migrations += outcome.finished.migrations


@asynccontextmanager
async def load(fleet: Fleet, *, at_once: int, max_tokens: int) -> AsyncIterator[Load]:
    """Sends requests without pause, `at_once` at a time, to all routers, until the context ends."""
    async with AsyncExitStack() as stack:
        stubs = []
        for node in fleet.nodes.values():
            if node.role == "router":
                channel = await stack.enter_async_context(open_channel(node.proxy.address))
                stubs.append(InferenceServiceStub(channel))
        async with requests_of(stubs, at_once=at_once, max_tokens=max_tokens) as loading:
            yield loading


@asynccontextmanager
async def requests_of(
    stubs: Sequence[InferenceServiceStub], *, at_once: int, max_tokens: int, attempts: int = _ATTEMPTS
) -> AsyncIterator[Load]:
    """The same, to these stubs in turn; a request that fails before its first event gets `attempts` attempts."""
    first = Outcome("first")
    await follow(stubs[0].Generate(_request(max_tokens), timeout=60), first)
    assert first.is_right, first
    loading = Load(first.ids)
    ending = asyncio.Event()
    turns = itertools.cycle(stubs)

    async def send() -> None:
        while not ending.is_set():
            loading.count(await _run(turns, max_tokens, loading, attempts))

    clients = [asyncio.create_task(send()) for _ in range(at_once)]
    try:
        yield loading
    finally:
        ending.set()
        await asyncio.gather(*clients)


async def _run(
    stubs: "itertools.cycle[InferenceServiceStub]", max_tokens: int, loading: Load, attempts: int
) -> Outcome:
    for _ in range(attempts):
        outcome = Outcome(uuid.uuid4().hex)
        await follow(next(stubs).Generate(_request(max_tokens), timeout=_DEADLINE_SECONDS), outcome)
        if outcome.code != "UNAVAILABLE" or outcome.sequences:
            break
        loading.retries += 1
    return outcome


def _request(max_tokens: int) -> pb.GenerateRequest:
    request = pb.GenerateRequest(prompt="a prompt of some length, which is the same for all")
    request.sampling.seed = 1
    request.stopping.max_tokens = max_tokens
    request.routing.cache_salt = uuid.uuid4().hex
    return request
