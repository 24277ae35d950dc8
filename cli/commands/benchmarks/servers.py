"""The load, and the servers that get it: Baton's router by gRPC, or any server of OpenAI's API by its URL."""

import argparse
import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ConfigError, ModelNotFound, Unavailable
from baton.inference.v1 import generate_pb2
from cli.commands.benchmarks.reports import Progress
from cli.connection import connect, find_credentials
from devtools.bench.load import AtOnce, Load, Step, sweep
from devtools.bench.openai_server import HttpTarget, OpenAIServer
from devtools.bench.servers import BenchServer, GrpcServer
from devtools.bench.workload import Images, Lengths, Workload, read_lengths


def workload_of(arguments: argparse.Namespace) -> Workload:
    """The lengths and the images of requests. Raises ConfigError for a file of lengths that is wrong."""
    pairs = read_lengths(Path(arguments.lengths)) if arguments.lengths else ()
    images = Images(arguments.images, arguments.image_size, arguments.image_repeat)
    return Workload(Lengths(pairs, arguments.input, arguments.output), images)


def steps_of(arguments: argparse.Namespace) -> list[Step]:
    """The steps of a sweep. Raises ConfigError if there is none."""
    if not arguments.rate and not arguments.concurrency:
        raise ConfigError(f"bench {arguments.action}: give --rate, --concurrency or both")
    return sweep(arguments.rate, arguments.concurrency, arguments.requests, arguments.seed)


_CONNECTIONS = 8
_POLL_SECONDS = 0.5
_GRPC = "grpc://"
_TOPOLOGIES = {
    "": generate_pb2.TOPOLOGY_UNSPECIFIED,
    "agg": generate_pb2.TOPOLOGY_AGGREGATED,
    "disagg": generate_pb2.TOPOLOGY_DISAGGREGATED,
}
# Of the prompts of a warm-up, which no step has.
_WARMUP_SEED = 2**65


@dataclass(frozen=True, slots=True)
class Target:
    """A server that answers, and the load that it gets."""

    name: str
    load: Load


@asynccontextmanager
async def target_of(arguments: argparse.Namespace, url: str, progress: Progress) -> AsyncGenerator[Target, None]:
    """The server of a URL, or the router of `--address` for an empty one, once it serves the model.

    Raises Unavailable if it does not within `--wait` seconds, ModelNotFound, and ConfigError for a wrong URL.
    """
    async with AsyncExitStack() as stack:
        server = await _open(arguments, url, stack)
        model = await _served_model(server, arguments.model, arguments.wait)
        yield Target(url or "Baton by gRPC", Load(server, model, progress.ended))


async def warm_up(target: Target, workload: Workload, requests: int, progress: Progress) -> None:
    """Sends so many requests of other prompts, all at once. Raises Unavailable if every one of them fails."""
    if not requests:
        return
    step = AtOnce(requests, requests, _WARMUP_SEED)
    planned = step.plan(workload)
    progress.begin(f"{target.name}: warm-up", planned)
    answers = await step.run(target.load, planned)
    if all(answer.error for answer in answers):
        raise Unavailable(f"{target.name}: every request of the warm-up has failed: {answers[0].error}")


async def _open(arguments: argparse.Namespace, url: str, stack: AsyncExitStack) -> BenchServer:
    if not url or url.startswith(_GRPC):
        options = argparse.Namespace(**{**vars(arguments), "address": url.removeprefix(_GRPC) or arguments.address})
        clients = [await stack.enter_async_context(connect(options)) for _ in range(_CONNECTIONS)]
        return GrpcServer(clients, _TOPOLOGIES[arguments.mode], arguments.timeout)
    credentials = find_credentials(arguments)
    api_key = credentials.token.get_secret_value() or os.environ.get("OPENAI_API_KEY", "")
    ca = credentials.tls.ca if credentials.tls else None
    server = OpenAIServer(HttpTarget.of_url(url, str(ca) if ca else None, api_key), arguments.timeout)
    stack.push_async_callback(server.close)
    return server


async def _served_model(server: BenchServer, asked: str, wait_seconds: float) -> str:
    """The model's name, as soon as it is served."""
    deadline = asyncio.get_running_loop().time() + wait_seconds
    while True:
        try:
            return _chosen(asked, await server.models())
        except (Unavailable, ModelNotFound):
            if asyncio.get_running_loop().time() >= deadline:
                raise
        await asyncio.sleep(_POLL_SECONDS)


def _chosen(asked: str, served: Sequence[str]) -> str:
    if asked in served:
        return asked
    if not served:
        raise Unavailable("no model is served yet")
    if asked:
        raise ModelNotFound(f"{asked!r} is not served; the server has {', '.join(served)}")
    if len(served) > 1:
        raise ConfigError(f"--model: name one of {', '.join(served)}")
    return served[0]
