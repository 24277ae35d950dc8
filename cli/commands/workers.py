"""`baton workers`: the registered workers, their health as the router sees it, and their load."""

import argparse

from baton.inference.v1 import cluster_service_pb2, generate_pb2
from cli.connection import connect
from cli.terminal import output, table


async def run(arguments: argparse.Namespace) -> int:
    """Prints a table of workers."""
    async with connect(arguments) as client:
        workers = await client.workers()
    if not workers:
        print("no worker is registered")
        return 0
    columns = ["worker", "role", "state", "address", "model", "running/waiting", "blocks used/held/total", "cache"]
    numbers = ["running/waiting", "blocks used/held/total"]
    output().print(table(columns, [_row(each) for each in workers], numbers=numbers))
    for worker in workers:
        if worker.problem:
            print(f"{worker.worker_id}: {worker.problem}")
    return 0


def _row(worker: cluster_service_pb2.Worker) -> list[str]:
    load = worker.load
    return [
        worker.worker_id,
        ", ".join(worker.roles),
        state_name(worker.state),
        worker.address,
        worker.model,
        f"{load.running}/{load.waiting}",
        f"{load.blocks_used}/{load.blocks_held}/{load.blocks_total}",
        generate_pb2.CacheView.Name(worker.cache_view).removeprefix("CACHE_VIEW_").lower(),
    ]


def state_name(state: "cluster_service_pb2.WorkerState.ValueType") -> str:
    """The state in one word: ready, unhealthy or draining."""
    return cluster_service_pb2.WorkerState.Name(state).removeprefix("WORKER_STATE_").lower()
