"""Waiting until a local cluster answers: every worker is ready, and a real request has come back."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from baton.inference.v1 import cluster_service_pb2, generate_pb2

from client.api import Client
from client.local.state import ClusterState, ProcessState, StateFolder
from rpc.aio import timeout
from rpc.errors import BatonError, Unavailable

POLL_SECONDS = 0.1
REQUEST_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Step:
    """Something that `baton up` waits for has happened, so many seconds after it began to wait."""

    text: str
    seconds: float


class StartFailed(BatonError):
    """The cluster did not start; the message says which process ended and how."""

    reason = "START_FAILED"

    def __init__(self, message: str, process: str = "") -> None:
        super().__init__(message)
        self.process = process


async def steps(folder: StateFolder, started: float) -> AsyncGenerator[Step, None]:
    """Yields each step towards a cluster that answers, and ends when it does. `started` is of the monotonic clock.

    Raises StartFailed as soon as a process has ended.
    """
    async for state in _states(folder):
        if all(each.pid for each in state.processes):
            break
    yield Step(f"{len(state.processes)} processes are running", time.monotonic() - started)
    await _until_listening(folder, state.address)
    yield Step("the router listens", time.monotonic() - started)
    async with Client(state.address) as client:
        async with aclosing(_ready_workers(folder, client, state)) as workers:
            async for worker in workers:
                yield Step(f"{worker} is ready", time.monotonic() - started)
        async for _ in _states(folder):
            if await answers(client, state):
                break
    yield Step("a first request was answered", time.monotonic() - started)


async def answers(client: Client, state: ClusterState) -> bool:
    """Whether a real request comes back, over a handoff where the cluster has both roles.

    An unavailable cluster is False; every other error is raised.
    """
    request = generate_pb2.GenerateRequest(prompt="Repeat: hello")
    request.stopping.max_tokens = 2
    if state.options.prefill:
        request.routing.topology = generate_pb2.TOPOLOGY_DISAGGREGATED
    try:
        async with aclosing(client.generate(request, timeout_seconds=REQUEST_SECONDS)) as events:
            return any([event.HasField("finished") async for event in events])
    except Unavailable:
        return False


async def _ready_workers(folder: StateFolder, client: Client, state: ClusterState) -> AsyncGenerator[str, None]:
    """The names of workers as the router finds them ready, until it has all."""
    missing = {each.name for each in state.processes if each.role in ("prefill", "decode")}
    async for _ in _states(folder):
        for name in sorted(await _ready(client) & missing):
            missing.remove(name)
            yield name
        if not missing:
            return


async def _ready(client: Client) -> set[str]:
    try:
        workers = await client.workers()
    except Unavailable:
        return set()
    return {each.worker_id for each in workers if each.state == cluster_service_pb2.WORKER_STATE_READY}


async def _until_listening(folder: StateFolder, address: str) -> None:
    # gRPC would wait longer after each refusal; a plain connection does not.
    async for _ in _states(folder):
        if await is_listening(address):
            return


async def is_listening(address: str) -> bool:
    """Whether something accepts connections at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        async with timeout(1):
            _, writer = await asyncio.open_connection(host, int(port))
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    return True


async def _states(folder: StateFolder) -> AsyncGenerator[ClusterState, None]:
    """The cluster's state, again and again. Raises StartFailed once the supervisor or a process has ended."""
    while True:
        state = folder.read()
        if state is None and not folder.has_supervisor:
            raise StartFailed("the supervisor has ended", "supervisor")
        if state is not None:
            _raise_if_ended(state.processes)
            yield state
        await asyncio.sleep(POLL_SECONDS)


def _raise_if_ended(processes: tuple[ProcessState, ...]) -> None:
    for each in processes:
        if each.last_exit is not None:
            raise StartFailed(f"{each.name} has ended, {_how(each.last_exit)}", each.name)


def _how(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"with exit code {code}"
