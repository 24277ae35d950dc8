"""`baton up`: starts a cluster on this machine, and returns after its first completed request."""

import argparse
import asyncio
import sys
import time
from contextlib import aclosing
from pathlib import Path

from baton import AsyncClient
from baton.errors import InvalidRequest
from cli.arguments.cluster import other_roles
from cli.local.lifecycle import start, stop
from cli.local.plan import ClusterOptions, gpu_warning, has_vision, model_folder
from cli.local.readiness import Readiness, StartFailed, answers
from cli.local.state import ClusterState, StateFolder, last_lines
from cli.terminal import output
from runtime.aio import timeout

# Engines such as vLLM take minutes to start; a process that ends is noticed at once.
READY_SECONDS = 900.0
LINES_OF_FAILURE = 25


async def start_cluster(arguments: argparse.Namespace) -> int:
    """Starts a cluster unless one is running. With other options it changes nothing and asks for `baton down`."""
    options = cluster_options(arguments)
    folder = StateFolder()
    state = folder.read()
    if state is None:
        return await _start(folder, options)
    if state.options != options:
        print(f"already running with other options ({_words(state.options)}): run `baton down` (make down) first")
        return 1
    return await _check(folder, state)


def cluster_options(arguments: argparse.Namespace) -> ClusterOptions:
    """The cluster that the options describe; the mode decides the counts that are not given."""
    if arguments.decode < 1:
        raise InvalidRequest.of(
            "--decode", "must be at least 1: a cluster without a decode worker completes no request"
        )
    mode = arguments.mode or _default_mode(arguments)
    return ClusterOptions(
        encode=int(mode == "epd") if arguments.encode is None else arguments.encode,
        prefill=int(mode != "agg") if arguments.prefill is None else arguments.prefill,
        decode=arguments.decode,
        others={role: count for role in other_roles() if (count := getattr(arguments, role))},
        engine=arguments.engine,
        model=str(Path(arguments.model).resolve()) if arguments.model else "",
        routers=max(1, arguments.routers),
        router_processes=max(1, arguments.router_processes),
        envoy=arguments.envoy,
        openai_port=arguments.openai,
        share_gpus=arguments.share_gpus,
    )


def _default_mode(arguments: argparse.Namespace) -> str:
    """`epd` for a model with a vision tower, else `disagg`."""
    return "epd" if arguments.engine == "pytorch" and has_vision(model_folder(arguments.model)) else "disagg"


async def _check(folder: StateFolder, state: ClusterState) -> int:
    """Reports whether the running cluster is healthy; waits for one that is still starting."""
    print(f"already running ({_words(state.options)})")
    async with timeout(READY_SECONDS), AsyncClient(state.address) as client:
        if all(each.pid for each in state.processes) and await answers(client, state):
            print("and healthy: it has just completed a request")
            return _explain(state)
    restarts = {each.name: each.restarts for each in state.processes}
    return await _wait(folder, Readiness(folder, time.monotonic(), restarts))


async def _start(folder: StateFolder, options: ClusterOptions) -> int:
    """Starts the cluster; if that fails or is interrupted, stops it again."""
    print(f"starting etcd and {_words(options)}", flush=True)
    if options.engine != "vllm" and (warning := gpu_warning(options)):  # vLLM's plan refuses it
        _say(f"warning: {warning}; --share-gpus if that is meant")
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
    # In a separate task: a second Ctrl-C interrupts this command, and must not leave half a cluster.
    _say("stopping the processes that were started")
    stopping = asyncio.ensure_future(stop(folder))
    while not stopping.done():
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            continue


async def _wait(folder: StateFolder, readiness: Readiness) -> int:
    """Prints each step until the cluster completes a request; if a process exits, prints the end of its log."""
    try:
        async with timeout(READY_SECONDS):
            await _show_steps(readiness)
    except StartFailed as failure:
        _say(f"error: {failure.message}; the end of its log, {folder.log(failure.process)}:")
        _say("\n".join(f"  {line}" for line in last_lines(folder.log(failure.process), LINES_OF_FAILURE)))
        return 1
    except TimeoutError:
        _say(f"error: no completed request within {READY_SECONDS:g} s; see {folder.logs}")
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
        "".join(f"Envoy serves gRPC, gRPC-Web and JSON: http://{address}/v1/models\n" for address in envoys),
        end="",
    )
    served = [each.openai for each in state.processes if each.openai]
    print("".join(f"OpenAI's API: http://{address}/v1\n" for address in served), end="")
    traces = [each.address for each in state.processes if each.role == "traces"]
    print("".join(f"Traces of all requests: http://{address}\n" for address in traces))
    return 0


def _words(options: ClusterOptions) -> str:
    model = f", model {Path(options.model).name}" if options.model else ""
    encode = f"{options.encode} encode, " if options.encode else ""
    others = "".join(f"{count} {role}, " for role, count in options.others.items())
    routers = "1 router" if options.routers == 1 else f"{options.routers} routers"
    edge = f"{routers} behind Envoy" if options.envoy else routers
    workers = f"{encode}{options.prefill} prefill, {options.decode} decode, {others}"
    return f"{edge}, {workers}engine {options.engine}{model}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
