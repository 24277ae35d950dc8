"""`baton workers`: who is registered, whether the router sends work there, and how busy each one is."""

import argparse

from baton.inference.v1 import cluster_service_pb2

from client.connection import connect
from client.terminal import output, table


async def run(arguments: argparse.Namespace) -> int:
    """Prints a table of workers."""
    async with connect(arguments) as client:
        workers = await client.workers()
    if not workers:
        print("no worker is registered")
        return 0
    columns = ["worker", "role", "state", "address", "model", "running/waiting", "blocks used/held/total"]
    numbers = ["running/waiting", "blocks used/held/total"]
    output().print(table(columns, [_row(each) for each in workers], numbers=numbers))
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
    ]


def state_name(state: "cluster_service_pb2.WorkerState.ValueType") -> str:
    """The state in a word: ready, unhealthy, draining."""
    return cluster_service_pb2.WorkerState.Name(state).removeprefix("WORKER_STATE_").lower()
