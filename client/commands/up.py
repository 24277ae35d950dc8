"""`baton up`: starts a cluster on this machine, and returns once it has answered a request."""

import argparse
import asyncio
import sys
import time
from contextlib import aclosing
from pathlib import Path

from client.api import Client
from client.local.lifecycle import start, stop
from client.local.logs import last_lines
from client.local.plan import ClusterOptions, has_eyes, model_folder
from client.local.readiness import Readiness, StartFailed, answers
from client.local.state import ClusterState, StateFolder
from client.terminal import output
from rpc.aio import timeout
from rpc.errors import InvalidRequest

READY_SECONDS = 300.0
LINES_OF_FAILURE = 25


async def run(arguments: argparse.Namespace) -> int:
    """Starts what is not there. A cluster with other options is left as it is: `baton down` ends it first."""
    options = _options(arguments)
    folder = StateFolder()
    state = folder.read()
    if state is None:
        return await _start(folder, options)
    if state.options != options:
        print(f"already running with other options ({_words(state.options)}): run `baton down` (make down) first")
        return 1
    return await _check(folder, state)


def _options(arguments: argparse.Namespace) -> ClusterOptions:
    if arguments.decode < 1:
        raise InvalidRequest.of("--decode", "must be at least 1: a cluster without a decode worker answers nothing")
    sees = arguments.engine == "pytorch" and has_eyes(model_folder(arguments.model))
    return ClusterOptions(
        encode=int(sees) if arguments.encode is None else arguments.encode,
        prefill=arguments.prefill,
        decode=arguments.decode,
        engine=arguments.engine,
        model=str(Path(arguments.model).resolve()) if arguments.model else "",
        routers=max(1, arguments.routers),
        envoy=arguments.envoy,
    )


async def _check(folder: StateFolder, state: ClusterState) -> int:
    """Says whether the cluster that runs here answers; one that is still starting is waited for."""
    print(f"already running ({_words(state.options)})")
    async with timeout(READY_SECONDS), Client(state.address) as client:
        if all(each.pid for each in state.processes) and await answers(client, state):
            print("and healthy: a request was answered just now")
            return _explain(state)
    restarts = {each.name: each.restarts for each in state.processes}
    return await _wait(folder, Readiness(folder, time.monotonic(), restarts))


async def _start(folder: StateFolder, options: ClusterOptions) -> int:
    """Starts the cluster; whatever interrupts that ends it again."""
    print(f"starting etcd and {_words(options)}", flush=True)
    readiness = Readiness(folder, time.monotonic())
    complete = False
    try:
        await start(folder, options)
        code = await _wait(folder, readiness)
        complete = code == 0
        return code
    finally:
        if not complete:
            await _undo(folder)


async def _undo(folder: StateFolder) -> None:
    # In a task of its own: a second Ctrl-C interrupts this command, and must not leave half a cluster.
    _say("ending what was started")
    stopping = asyncio.ensure_future(stop(folder))
    while not stopping.done():
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            continue


async def _wait(folder: StateFolder, readiness: Readiness) -> int:
    """Shows each step until the cluster answers; says what ended instead, if it does not."""
    try:
        async with timeout(READY_SECONDS):
            await _show_steps(readiness)
    except StartFailed as failure:
        _say(f"error: {failure.message}; the end of its log, {folder.log(failure.process)}:")
        _say("\n".join(f"  {line}" for line in last_lines(folder.log(failure.process), LINES_OF_FAILURE)))
        return 1
    except asyncio.TimeoutError:
        _say(f"error: no answer within {READY_SECONDS:g} s; see {folder.logs}")
        return 1
    state = folder.read()
    return 1 if state is None else _explain(state)


async def _show_steps(readiness: Readiness) -> None:
    console = output()
    with console.status("loading the model"):
        async with aclosing(readiness.steps()) as steps:
            async for step in steps:
                console.print(f"  {step.seconds:5.1f} s  {step.text}")


def _explain(state: ClusterState) -> int:
    print(f'\nThe router listens at {state.address}. Try:\n\n  .venv/bin/baton generate "Sort: pear apple mango"')
    if state.options.encode:
        example = "models/demo/examples/circle-and-square.png"
        print(f'  .venv/bin/baton generate "What is in the picture?" --image {example}')
    print()
    envoys = [each.address for each in state.processes if each.role == "envoy"]
    print(
        "".join(f"Through Envoy, as gRPC, gRPC-Web and JSON: http://{address}/v1/models\n" for address in envoys),
        end="",
    )
    traces = [each.address for each in state.processes if each.role == "traces"]
    print("".join(f"Where the time of each request went: http://{address}\n" for address in traces))
    return 0


def _words(options: ClusterOptions) -> str:
    model = f", model {Path(options.model).name}" if options.model else ""
    encode = f"{options.encode} encode, " if options.encode else ""
    routers = "1 router" if options.routers == 1 else f"{options.routers} routers"
    edge = f"{routers} behind Envoy" if options.envoy else routers
    return f"{edge}, {encode}{options.prefill} prefill, {options.decode} decode, engine {options.engine}{model}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
