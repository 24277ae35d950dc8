"""Runs a Compose topology through its life: `python -m tools.containers.compose MODE`, or `make compose`.

It starts it, waits until all is healthy, sends text (to `epd` a picture too), scales a role from one worker to
three and back to one under load, and ends it; a request that fails, or anything that is left behind, is a failure.
"""

import argparse
import asyncio
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from baton import AsyncClient, BatonError
from baton.inference.v1.cluster_service_pb2 import WORKER_STATE_READY, Worker
from tools.containers.engine import CommandFailed, Engine, NoEngine, find_engine
from tools.containers.project import FILES, Project, open_project

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "models/demo/examples/circle-and-square.png"
QUESTION = "How many shapes are there?"
SCALED = {"agg": "worker", "disagg": "prefill", "epd": "prefill", "envoy": "prefill"}
# The others have no worker that encodes.
WITH_PICTURES = ("epd",)
CLIENTS = 2
CHECK_SECONDS = 5.0
HEALTHY_SECONDS = 600.0
READY_SECONDS = 600.0
REQUEST_SECONDS = 120.0
LOAD_SECONDS = 10.0


class Failed(Exception):
    """The topology did not do what it should; the message says what."""


@dataclass
class Load:
    """The outcomes of the requests that were sent in the background."""

    completed: int = 0
    errors: list[str] = field(default_factory=list)


def main() -> int:
    """Runs the topology named on the command line, and prints each step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("mode", choices=FILES)
    mode: str = parser.parse_args().mode
    try:
        run(find_engine(), mode)
    except (NoEngine, CommandFailed, Failed, BatonError) as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


def run(engine: Engine, mode: str) -> None:
    """Runs the topology through its life. Raises Failed, CommandFailed."""
    started = time.monotonic()
    with open_project(engine, mode) as project:
        _wait_until_healthy(project)
        _say(started, f"{mode}: {len(project.containers())} containers are healthy")
        asyncio.run(_use(project, mode, started))
        if mode == "envoy":
            _say(started, f"through Envoy, as JSON: {_ask_through_envoy(project)}")
    if left := project.leftovers():
        raise Failed(f"left behind: {', '.join(left)}")
    _say(started, "ended, with nothing left behind")


def _wait_until_healthy(project: Project) -> None:
    deadline = time.monotonic() + HEALTHY_SECONDS
    unhealthy = project.containers()
    # A check is a process that starts Python: one that has passed is not asked again.
    while unhealthy := [each for each in unhealthy if not project.is_healthy(each)]:
        if time.monotonic() > deadline:
            logs = project.engine.command("logs", "--tail", "20", unhealthy[0])
            shown = subprocess.run(logs, capture_output=True, text=True, env=project.engine.environment)
            raise Failed(f"not healthy: {', '.join(unhealthy)}\n{shown.stdout}{shown.stderr}")
        time.sleep(CHECK_SECONDS)


async def _use(project: Project, mode: str, started: float) -> None:
    async with AsyncClient(f"127.0.0.1:{project.variables['BATON_PORT']}") as client:
        await _wait_for_workers(client, SCALED[mode], 1)
        text = await client.generate("Sort: pear apple mango", timeout_seconds=REQUEST_SECONDS).text()
        _say(started, f"text: {text.strip()}")
        if mode in WITH_PICTURES:
            picture = client.generate(QUESTION, images=[PICTURE], timeout_seconds=REQUEST_SECONDS)
            _say(started, f"picture: {(await picture.text()).strip()}")
        async with _load(client) as load:
            await _scale(project, client, SCALED[mode], started)
        _say(started, f"meanwhile {load.completed} requests, {len(load.errors)} errors")
        if load.errors or not load.completed:
            raise Failed(f"under load: {load.completed} requests completed, and failed: {load.errors[:3]}")


async def _scale(project: Project, client: AsyncClient, service: str, started: float) -> None:
    """One worker of the role becomes three, and then the first one again."""
    before = set(project.containers())
    await asyncio.to_thread(
        project.compose,
        "up",
        "--detach",
        "--no-build",
        "--no-recreate",
        "--no-deps",
        "--scale",
        f"{service}=3",
        service,
    )
    workers = await _wait_for_workers(client, service, 3)
    _say(started, f"{service}: {len(workers)} workers are ready")
    await asyncio.sleep(LOAD_SECONDS)
    added = sorted(set(project.containers()) - before)
    # Their stop_grace_period, as Compose would give it to them.
    await asyncio.to_thread(project.engine.run, "stop", "--time", "60", *added)
    codes = project.engine.run("inspect", "--format", "{{.State.ExitCode}}", *added).split()
    if set(codes) != {"0"}:
        raise Failed(f"{', '.join(added)} did not drain: exit codes {', '.join(codes)}")
    await _wait_for_workers(client, service, 1)
    _say(started, f"{service}: {len(added)} of them drained and ended with exit code 0")


async def _wait_for_workers(client: AsyncClient, service: str, count: int) -> list[Worker]:
    """The workers of a role that are ready, once there are that many. Raises Failed."""
    role = "prefill" if service == "worker" else service
    ready: list[Worker] = []
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        ready = [each for each in await client.workers() if role in each.roles and each.state == WORKER_STATE_READY]
        if len(ready) == count:
            return ready
        await asyncio.sleep(0.5)
    raise Failed(f"{len(ready)} workers for {role} are ready instead of {count}")


@asynccontextmanager
async def _load(client: AsyncClient) -> AsyncIterator[Load]:
    """Sends requests from several clients meanwhile."""
    load, ended = Load(), asyncio.Event()

    async def send(number: int) -> None:
        while not ended.is_set():
            number += CLIENTS
            try:
                await client.generate(f"Sort: pear apple mango {number}", timeout_seconds=REQUEST_SECONDS).text()
            except BatonError as error:
                load.errors.append(str(error))
            else:
                load.completed += 1

    tasks = [asyncio.create_task(send(number)) for number in range(CLIENTS)]
    try:
        yield load
    finally:
        ended.set()
        await asyncio.gather(*tasks)


def _ask_through_envoy(project: Project) -> str:
    url = f"http://127.0.0.1:{project.variables['BATON_ENVOY_PORT']}/v1/generate"
    request = urllib.request.Request(url, b'{"prompt": "Sort: pear apple mango"}', {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:
        body: bytes = answer.read()
    return body.decode()[-160:].replace("\n", " ")


def _say(started: float, what: str) -> None:
    print(f"{time.monotonic() - started:6.1f} s  {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
