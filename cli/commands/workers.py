"""`baton workers`: the registered workers, their health as the router sees it, and their load."""

import argparse

from baton.enum_names import value_name
from baton.inference.v1 import cluster_service_pb2, generate_pb2
from cli.connection import connect
from cli.terminal import output, table

_NUMBERS = ("running/waiting", "blocks used/held/total")
_KEPT = "kept/parked"
_COLUMNS = ("worker", "role", "state", "address", "model", *_NUMBERS, "cache", "transports")


async def run(arguments: argparse.Namespace) -> int:
    """Prints a table of workers."""
    async with connect(arguments) as client:
        workers = await client.workers()
    if not workers:
        print("no worker is registered")
        return 0
    columns, rows = list(_COLUMNS), [_row(each) for each in workers]
    if any(map(_location, workers)):
        columns.append("location")
        rows = [[*row, _location(each) or "-"] for row, each in zip(rows, workers, strict=True)]
    if any(each.load.kept_streams for each in workers):
        columns.append(_KEPT)
        rows = [
            [*row, f"{each.load.kept_streams}/{each.load.parked_streams}"]
            for row, each in zip(rows, workers, strict=True)
        ]
    output().print(table(columns, rows, numbers=(*_NUMBERS, _KEPT)))
    for worker in workers:
        for problem in filter(None, [worker.problem, *worker.pairing_problems]):
            print(f"{worker.worker_id}: {problem}")
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
        value_name(generate_pb2.CacheView, worker.cache_view),
        _transports(worker),
    ]


def _location(worker: cluster_service_pb2.Worker) -> str:
    """The labels that it tells, the largest place first."""
    labels = (worker.location.zone, worker.location.rack, worker.location.host)
    return "/".join(label or "?" for label in labels) if any(labels) else ""


def _transports(worker: cluster_service_pb2.Worker) -> str:
    """Those by which it hands KV over, or takes it over; a dash if it does not say."""
    if not worker.HasField("transports"):
        return "-"
    offers = ", ".join(worker.transports.offers) or "none"
    reads = ", ".join(worker.transports.reads) or "none"
    match list(worker.roles):
        case ["prefill"]:
            return offers
        case ["decode"]:
            return reads
        case _ if offers == reads:
            return offers
        case _:
            return f"offers {offers}; reads {reads}"


def state_name(state: "cluster_service_pb2.WorkerState.ValueType") -> str:
    """The state in one word: ready, unhealthy or draining."""
    return value_name(cluster_service_pb2.WorkerState, state)
