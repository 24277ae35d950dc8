"""The routers that are compared: how each is started, and how load reaches it."""

import asyncio
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.peers import baton_router
from benchmarks.peers.clients.grpc_client import GrpcClient, WorkersClient
from benchmarks.peers.clients.http_client import HttpClient
from benchmarks.peers.clients.load import PACED, STEP_SECONDS, LoadClient
from benchmarks.peers.cores import Cores, on_cores, running, stop
from benchmarks.peers.dynamo import dynamo
from benchmarks.peers.edge import envoy
from benchmarks.peers.environments import DYNAMO, HTTP, SMG, Environment
from benchmarks.peers.grpc_engine import write_tokenizer
from cli.local.ports import free_port
from discovery.record import WorkerRecord
from rpc.server import ServerKind
from runtime.aio import timeout

_PATIENCE_SECONDS: Final = 90.0
_CHECKOUT = Path(__file__).resolve().parents[2]
# How a load reaches a router.
EIGHT, EACH, ENVOY = "8 connections", "a connection a stream", "through Envoy"


@dataclass(frozen=True, slots=True)
class Bench:
    """The parts that all routers share: the folder, the cores, and the engines."""

    folder: Path
    cores: Cores
    log: Path
    records: Sequence[WorkerRecord]
    spans: str
    engines: tuple[int, int]
    baton_steps: Path
    http_steps: Path

    @property
    def workers(self) -> dict[str, str]:
        """The addresses of Baton's workers, by their ids."""
        return {record.worker_id: record.address for record in self.records}


@dataclass(frozen=True, slots=True)
class Router:
    """A router that serves. Without a process it is the engines themselves."""

    name: str
    pid: int | None
    clients: dict[str, LoadClient]
    # Where its engines note their steps; None if they do not.
    steps: Path | None
    # Of a client that asks those engines itself.
    direct: LoadClient | None = None
    runs: str = ""
    address: str = ""
    served: str = ""  # the only model that it takes the engine to have
    version: str = ""  # of the package

    @property
    def label(self) -> str:
        """Its name in tables, with the version."""
        return f"{self.name} {self.version}".rstrip()


@dataclass(frozen=True, slots=True)
class Baton:
    """One row of Baton's: the server, the interpreter, and whose modules go first."""

    name: str
    server: ServerKind
    python: str = sys.executable
    is_installed: bool = False
    # Every prompt is prefilled on one worker and decoded on another, whatever that would gain.
    policy: str = "least_loaded"


@asynccontextmanager
async def baton(bench: Bench, candidate: Baton, ways: Sequence[str]) -> AsyncIterator[Router]:
    """Baton's router. Raises OSError if it does not start."""
    asked = {
        "checkout": str(_CHECKOUT),
        "checkout_first": not candidate.is_installed,
        "server": candidate.server,
        "policy": candidate.policy,
        "spans": bench.spans,
        "records": [record.to_json().decode() for record in bench.records],
    }
    command = [candidate.python, "-I", str(Path(baton_router.__file__)), json.dumps(asked)]
    with bench.log.open("ab") as log, on_cores(bench.cores.router):
        process = subprocess.Popen(  # noqa: ASYNC220  # before anything is measured
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
    async with AsyncExitStack() as stack:
        stack.callback(stop, process)
        assert process.stdout
        async with timeout(_PATIENCE_SECONDS):
            line = await asyncio.to_thread(process.stdout.readline)
        if not line:
            raise OSError(f"{candidate.python} has ended; see {bench.log}")
        told: dict[str, Any] = json.loads(line)
        clients: dict[str, LoadClient] = {EIGHT: GrpcClient(told["address"])}
        if EACH in ways:
            clients[EACH] = GrpcClient(told["address"], connections=0)
        if ENVOY in ways:
            starting = envoy(told["address"], bench.folder, bench.cores, bench.log, is_grpc=True)
            clients[ENVOY] = GrpcClient(await stack.enter_async_context(starting))
        direct = WorkersClient(bench.workers)
        for client in (*clients.values(), direct):
            stack.callback(client.close)
        yield Router(candidate.name, process.pid, clients, bench.baton_steps, direct, told["runs"], told["address"])


@asynccontextmanager
async def engines(ports: Sequence[int], steps: Path, log: Path, cores: Cores) -> AsyncIterator[None]:
    """The prefill and the decode worker of routers that relay bytes."""
    command = [sys.executable, "-m", "benchmarks.peers.engine"]
    async with AsyncExitStack() as stack:
        for role, port in zip(("prefill", "decode"), ports, strict=True):
            await stack.enter_async_context(running([*command, role, str(port), str(steps)], log, cores.others))
        for port in ports:
            await _models(port)
        yield


@dataclass(frozen=True, slots=True)
class Relay:
    """A router that passes on the bytes of engines over HTTP: where it is installed, and its command line.

    `served` is the only model that it takes the engine to have, if it routes by models.
    """

    name: str
    environment: Environment
    module: str
    options: tuple[str, ...]
    prefill_port: tuple[str, ...] = ()  # that a prefill engine would tell its partner
    served: str = ""
    scheme: str = "http"

    def command(self, bench: Bench, port: int, engines: Sequence[int]) -> list[str]:
        """With prefill and decode apart."""
        prefill, decode = (f"{self.scheme}://127.0.0.1:{engine}" for engine in engines)
        listening = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        workers = ["--prefill", prefill, *self.prefill_port, "--decode", decode]
        return [str(self.environment.python(bench.folder)), "-m", self.module, *self.options, *workers, *listening]

    @property
    def router(self) -> Router:
        """The router before it has started."""
        version = self.environment.version(self.name.partition(" ")[0])
        return Router(self.name, None, {}, None, served=self.served, version=version)


_RELAYS: Final = (
    Relay("vllm-router", HTTP, "vllm_router.launch_router", ("--vllm-pd-disaggregation",)),
    Relay("sglang-router", HTTP, "sglang_router.launch_router", ("--pd-disaggregation",), ("9001",)),
    Relay(
        "smg",
        SMG,
        "smg.launch_router",
        ("--pd-disaggregation", "--prometheus-host", "127.0.0.1"),
        ("none",),
        served=PACED,
    ),
)
_SMG_BY_GRPC: Final = replace(_RELAYS[-1], name="smg (gRPC)", scheme="grpc")


@asynccontextmanager
async def relay(bench: Bench, which: Relay, ways: Sequence[str]) -> AsyncIterator[Router]:
    """A relay that serves. Raises OSError if it does not start."""
    if not which.environment.is_complete(bench.folder):
        raise OSError("it is not installed; see benchmarks/peers/environments.py")
    port = free_port()
    command = which.command(bench, port, bench.engines)
    async with running(command, bench.log, bench.cores.router) as process:
        await _models(port, (which.served,) if which.served else (), process=process)
        direct = HttpClient(bench.engines[1])
        address = f"127.0.0.1:{port}"
        router = replace(which.router, pid=process.pid, steps=bench.http_steps, direct=direct, address=address)
        try:
            async with _http(bench, router, port, ways, which.served) as router:
                yield router
        finally:
            direct.close()


@asynccontextmanager
async def smg_by_grpc(bench: Bench, ways: Sequence[str]) -> AsyncIterator[Router]:
    """smg before engines of its own protocol, for which it tokenizes. Raises OSError if it does not start."""
    which = _SMG_BY_GRPC
    if not which.environment.is_complete(bench.folder):
        raise OSError("it is not installed; see benchmarks/peers/environments.py")
    port, model, steps = free_port(), (bench.folder / "smg-model").resolve(), bench.folder / "grpc-steps"
    write_tokenizer(model)
    stubs = which.environment.modules(bench.folder)
    ports = (free_port(), free_port())
    async with AsyncExitStack() as stack:
        for role, engine in zip(("prefill", "decode"), ports, strict=True):
            module = [sys.executable, "-m", "benchmarks.peers.grpc_engine"]
            command = [*module, role, str(engine), str(steps), str(stubs), str(model)]
            await stack.enter_async_context(running(command, bench.log, bench.cores.others))
            await _listens(engine)
        command = [*which.command(bench, port, ports), "--model-path", str(model)]
        process = await stack.enter_async_context(running(command, bench.log, bench.cores.router))
        await _models(port, (which.served,), process=process)
        router = replace(which.router, pid=process.pid, steps=steps, address=f"127.0.0.1:{port}")
        yield await stack.enter_async_context(_http(bench, router, port, ways, which.served))


@asynccontextmanager
async def dynamo_frontend(bench: Bench, ways: Sequence[str]) -> AsyncIterator[Router]:
    """Dynamo's frontend, before its own mocker. Raises OSError if it does not start."""
    if not DYNAMO.is_complete(bench.folder):
        raise OSError("it is not installed: it needs Python 3.10; see benchmarks/peers/environments.py")
    port = free_port()
    async with dynamo(bench.folder, port, bench.cores, bench.log) as pid:
        await _models(port, tuple(STEP_SECONDS))
        async with _http(
            bench, Router("Dynamo", pid, {}, None, version=DYNAMO.version("ai-dynamo")), port, ways
        ) as router:
            yield router


@asynccontextmanager
async def _http(
    bench: Bench, router: Router, port: int, ways: Sequence[str], served: str = ""
) -> AsyncIterator[Router]:
    """A router of HTTP/1.1, where every stream needs a connection for itself."""
    async with AsyncExitStack() as stack:
        router.clients[EACH] = client = HttpClient(port, served)
        stack.callback(client.close)
        if ENVOY in ways:
            starting = envoy(f"127.0.0.1:{port}", bench.folder, bench.cores, bench.log, is_grpc=False)
            address = await stack.enter_async_context(starting)
            router.clients[ENVOY] = edge = HttpClient(int(address.rpartition(":")[2]), served)
            stack.callback(edge.close)
        yield router


def direct_to_workers(bench: Bench) -> Router:
    """The client before Baton's workers: it asks both itself."""
    return Router("no router (Baton's workers)", None, {EIGHT: WorkersClient(bench.workers)}, bench.baton_steps)


def direct_to_engine(bench: Bench) -> Router:
    """The client before the decode worker of routers that relay bytes."""
    return Router("no router (HTTP engine)", None, {EACH: HttpClient(bench.engines[1])}, bench.http_steps)


# How the routers of other projects are started.
PEERS: Final[dict[str, Callable[[Bench, Sequence[str]], Any]]] = {
    **{each.name: lambda bench, ways, each=each: relay(bench, each, ways) for each in _RELAYS},
    "smg-grpc": smg_by_grpc,
    "dynamo": dynamo_frontend,
}


async def _listens(port: int) -> None:
    """Waits until a server listens. Raises TimeoutError."""
    async with timeout(_PATIENCE_SECONDS):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.1)
            else:
                writer.close()
                return


async def _models(port: int, names: Sequence[str] = (), process: "subprocess.Popen[bytes] | None" = None) -> None:
    """Waits until a server answers, and lists these models. Raises TimeoutError, and OSError if the process ends."""
    async with timeout(_PATIENCE_SECONDS):
        while not await asyncio.to_thread(_lists, f"http://127.0.0.1:{port}/v1/models", names):
            if process is not None and process.poll() is not None:
                raise OSError(f"it has ended with {process.returncode}")
            await asyncio.sleep(0.1)


def _lists(url: str, names: Sequence[str]) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            if not names:
                return True
            return {model["id"] for model in json.load(answer)["data"]} >= set(names)
    except urllib.error.HTTPError:
        return not names
    except (OSError, ValueError):
        return False
