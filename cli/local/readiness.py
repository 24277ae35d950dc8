"""Waits until a local cluster is ready: every worker is ready, and a real request has completed."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import AsyncClient
from baton.calls import unary
from baton.errors import BatonError, DeadlineExceeded, Unavailable
from baton.inference.v1 import cluster_service_pb2, generate_pb2
from cli.local.state import ClusterState, ProcessState, StateFolder
from engine_protocol.roles import roles
from rpc.channels import open_channel
from runtime.network import is_listening

POLL_SECONDS = 0.1
REQUEST_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Step:
    """A step towards a ready cluster, and the seconds since `baton up` began to wait."""

    text: str
    seconds: float


class StartFailed(BatonError):
    """The cluster did not start; the message names the process that exited, and how."""

    reason = "START_FAILED"

    def __init__(self, message: str, process: str = "") -> None:
        super().__init__(message)
        self.process = process


class Readiness:
    """The wait for a cluster. `since` is when it began (monotonic clock); it fails if a process exits after that.

    `restarts` counts earlier restarts by the process's name.
    """

    def __init__(self, folder: StateFolder, since: float, restarts: Mapping[str, int] | None = None) -> None:
        self._folder = folder
        self._since = since
        self._restarts = restarts or {}

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Yields each step, and ends when the cluster completes a request and the viewer of traces listens.

        Raises StartFailed as soon as a process exits.
        """
        state = await self._until_running()
        yield self._step(f"{len(state.processes)} processes are running")
        for router in (each for each in state.processes if each.role == "router"):
            await self._until_listening(router.address)
            yield self._step(f"{router.name} listens")
        async with AsyncClient(state.address) as client:
            async with aclosing(self._ready_workers(client, state)) as workers:
                async for worker in workers:
                    yield self._step(f"{worker} is ready")
            await self._until_answered(client, state)
        yield self._step("a first request was completed")
        for envoy in (each for each in state.processes if each.role == "envoy"):
            await self._until_serving(envoy.address)
            yield self._step(f"{envoy.name} has found a router")
        # Its address is printed next.
        for viewer in (each for each in state.processes if each.role == "traces"):
            await self._until_listening(viewer.address)

    def _step(self, text: str) -> Step:
        return Step(text, time.monotonic() - self._since)

    async def _until_running(self) -> ClusterState:
        async with aclosing(self._states()) as states:
            async for state in states:
                if all(each.pid for each in state.processes):
                    return state
        raise AssertionError("states end only by raising")

    async def _until_listening(self, address: str) -> None:
        # gRPC would wait longer after each refusal; a plain connection does not.
        async with aclosing(self._states()) as states:
            async for _ in states:
                if await is_listening(address):
                    return

    async def _ready_workers(self, client: AsyncClient, state: ClusterState) -> AsyncGenerator[str, None]:
        """The names of workers as they become ready in the router, until all are."""
        missing = {each.name for each in state.processes if each.role in roles()}
        async with aclosing(self._states()) as states:
            async for _ in states:
                for name in sorted(await _ready(client) & missing):
                    missing.remove(name)
                    yield name
                if not missing:
                    return

    async def _until_answered(self, client: AsyncClient, state: ClusterState) -> None:
        async with aclosing(self._states()) as states:
            async for _ in states:
                if await answers(client, state):
                    return

    async def _until_serving(self, address: str) -> None:
        async with aclosing(self._states()) as states:
            async for _ in states:
                if await is_serving(address):
                    return

    async def _states(self) -> AsyncGenerator[ClusterState, None]:
        """The cluster's state, polled forever."""
        while True:
            state = self._folder.read()
            if state is None and not self._folder.has_supervisor:
                raise StartFailed("the supervisor exited", "supervisor")
            if state is not None:
                for each in state.processes:
                    self._raise_if_ended(each)
                yield state
            await asyncio.sleep(POLL_SECONDS)

    def _raise_if_ended(self, process: ProcessState) -> None:
        if process.last_exit is not None and process.restarts > self._restarts.get(process.name, 0):
            raise StartFailed(f"{process.name} exited, {_how(process.last_exit)}", process.name)


async def answers(client: AsyncClient, state: ClusterState) -> bool:
    """True if a real request completes, with a handoff if the cluster has both roles.

    False if the cluster is unavailable; raises every other error.
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


async def _ready(client: AsyncClient) -> set[str]:
    try:
        workers = await client.workers()
    except Unavailable:
        return set()
    return {each.worker_id for each in workers if each.state == cluster_service_pb2.WORKER_STATE_READY}


async def is_serving(address: str) -> bool:
    """True if the process at `host:port` reports that it is healthy."""
    async with open_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
        try:
            return bool((await unary(check)).status == health_pb2.HealthCheckResponse.SERVING)
        except (Unavailable, DeadlineExceeded):
            return False


def _how(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"with exit code {code}"
