"""`baton lora`: the adapters on the workers; loads and unloads them."""

import argparse

from baton.inference.v1 import lora_pb2
from cli.connection import connect
from cli.terminal import output, table


async def run(arguments: argparse.Namespace) -> int:
    """Prints what each worker has afterwards. Exit code 1 if a worker has failed, others may have succeeded."""
    async with connect(arguments) as client:
        if arguments.action == "list":
            workers = await client.loras(arguments.model)
        else:
            change = client.load_lora if arguments.action == "load" else client.unload_lora
            workers = await change(
                arguments.name,
                model=arguments.model,
                worker_ids=arguments.worker,
                timeout_seconds=arguments.timeout,
            )
    columns = ["worker", "adapter", "state", "rank", "content"]
    output().print(table(columns, [row for worker in workers for row in _rows(worker)], numbers=["rank"]))
    for worker in workers:
        if worker.problem:
            print(f"{worker.worker_id}: {worker.problem}")
        for rejected in worker.inventory.rejected:
            print(f"{worker.worker_id}: {rejected.name} is rejected: {rejected.reason}")
    return 1 if any(worker.problem for worker in workers) else 0


def _rows(worker: lora_pb2.WorkerLoras) -> list[list[str]]:
    if worker.problem:
        return [[worker.worker_id, "-", "failed", "", ""]]
    states = {"loaded": worker.inventory.loaded, "available": worker.inventory.available}
    rows = [
        [worker.worker_id, adapter.name, state, str(adapter.rank), adapter.digest[:12]]
        for state, adapters in states.items()
        for adapter in adapters
    ]
    return rows or [[worker.worker_id, "-", "none", "", ""]]
