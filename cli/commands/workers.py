"""The workers: their health and load, their adapters (`baton lora`), and where their answers run.

`baton move`, `baton drain` and `baton role` send what a worker runs elsewhere, and `baton upgrade` to its next process;
no request ends by them.
"""

import argparse
import time
from collections.abc import Iterator, Sequence

from baton.enum_names import value_name
from baton.errors import LayoutMismatch, Unsupported
from baton.inference.v1 import cluster_service_pb2, generate_pb2, lora_pb2
from cli.connection import connect
from cli.terminal import output, table
from engine_protocol.prefix_hash import tenant_digest

_WORKER_NUMBERS = ("running/waiting", "blocks used/held/total")
_KEPT = "kept/parked"
_COLUMNS = ("worker", "role", "state", "address", "model", *_WORKER_NUMBERS, "cache", "transports")
_MEMORY_COLUMNS = (
    *("worker", "pool used/total", "host used/total", "disk used/total"),
    *("in pool", "from host", "from disk", "prompt tokens"),
)


async def list_workers(arguments: argparse.Namespace) -> int:
    """Prints a table of workers."""
    async with connect(arguments) as client:
        workers = await client.workers()
        tenants = await client.tenants() if arguments.memory else None
    if not workers:
        print("no worker is registered")
        return 0
    if tenants is not None:
        output().print(table(_MEMORY_COLUMNS, [_memory(each) for each in workers], numbers=_MEMORY_COLUMNS[1:]))
        for line in _retained(workers, ["", *(each.tenant for each in tenants.tenants)]):
            print(line)
        return 0
    columns, rows = list(_COLUMNS), [_worker_row(each) for each in workers]
    if any(map(_location, workers)):
        columns.append("location")
        rows = [[*row, _location(each) or "-"] for row, each in zip(rows, workers, strict=True)]
    if any(each.load.kept_streams for each in workers):
        columns.append(_KEPT)
        rows = [
            [*row, f"{each.load.kept_streams}/{each.load.parked_streams}"]
            for row, each in zip(rows, workers, strict=True)
        ]
    output().print(table(columns, rows, numbers=(*_WORKER_NUMBERS, _KEPT)))
    for worker in workers:
        for problem in filter(None, [worker.problem, *worker.pairing_problems]):
            print(f"{worker.worker_id}: {problem}")
    return 0


def _worker_row(worker: cluster_service_pb2.Worker) -> list[str]:
    load = worker.load
    return [
        worker.worker_id,
        ", ".join(worker.roles),
        _state(worker),
        worker.address,
        worker.model,
        f"{load.running}/{load.waiting}",
        f"{load.blocks_used}/{load.blocks_held}/{load.blocks_total}",
        value_name(generate_pb2.CacheView, worker.cache_view),
        _transports(worker),
    ]


def _memory(worker: cluster_service_pb2.Worker) -> list[str]:
    """The blocks in each tier, and the shares of all prompts' tokens that were found there."""
    load, memory = worker.load, worker.load.memory
    if not load.HasField("memory"):
        return [worker.worker_id, f"{load.blocks_used}/{load.blocks_total}", *["-"] * 6]
    found = (memory.device_tokens, memory.host_tokens, memory.disk_tokens)
    shares = [f"{tokens / memory.prompt_tokens:.1%}" if memory.prompt_tokens else "-" for tokens in found]
    return [
        worker.worker_id,
        f"{load.blocks_used}/{load.blocks_total}",
        f"{memory.host_blocks_used}/{memory.host_blocks_total}",
        f"{memory.disk_blocks_used}/{memory.disk_blocks_total}",
        *shares,
        str(memory.prompt_tokens),
    ]


def _retained(workers: Sequence[cluster_service_pb2.Worker], tenants: Sequence[str]) -> Iterator[str]:
    """Lines of what each tenant retains, by its name if the routers know it, or else by the beginning of its digest."""
    names = {tenant_digest(tenant): tenant or "(default)" for tenant in tenants}
    for worker in workers:
        for one in worker.load.retained:
            share = one.blocks / max(1, worker.load.blocks_total)
            name = names.get(one.tenant, f"tenant {one.tenant.hex()[:8]}")
            yield f"{worker.worker_id}: {name} retains {one.blocks} blocks, {share:.1%} of the pool"


def _state(worker: cluster_service_pb2.Worker) -> str:
    """Its state, and of a model that sleeps the time to wake."""
    name = state_name(worker.state)
    if not worker.load.HasField("wake"):
        return name
    return f"{name}, asleep ({worker.load.wake.ToNanoseconds() / 1e9:.1f} s)"


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


async def move(arguments: argparse.Namespace) -> int:
    """Asks a worker to give answers away; routers move them within a moment."""
    async with connect(arguments) as client:
        streams = await client.move_streams(arguments.worker, streams=arguments.streams)
    print(f"{arguments.worker} gives {streams} {'answer' if streams == 1 else 'answers'} to other workers")
    return 0


async def drain(arguments: argparse.Namespace) -> int:
    """Waits until nothing is left on a worker."""
    started = time.monotonic()
    async with connect(arguments) as client:
        await client.drain_worker(arguments.worker, grace_seconds=arguments.grace)
    print(f"{arguments.worker} is drained after {time.monotonic() - started:.1f} s")
    return 0


async def change_role(arguments: argparse.Namespace) -> int:
    """Waits until nothing of the other role is left on a worker."""
    started = time.monotonic()
    async with connect(arguments) as client:
        await client.change_role(arguments.worker, arguments.role, timeout_seconds=arguments.timeout)
    print(f"{arguments.worker} has the role {arguments.role} after {time.monotonic() - started:.1f} s")
    return 0


async def upgrade(arguments: argparse.Namespace) -> int:
    """Waits until a worker's next process serves. If it does not fit, the worker is drained, if that was asked for."""
    started = time.monotonic()
    async with connect(arguments) as client:
        try:
            await client.upgrade_worker(arguments.worker, timeout_seconds=arguments.timeout)
        except (LayoutMismatch, Unsupported) as error:
            if not arguments.or_drain:
                raise
            print(f"{error.message}: draining {arguments.worker}")
            return await drain(arguments)
    print(f"{arguments.worker} is upgraded after {time.monotonic() - started:.1f} s")
    return 0


async def run_lora(arguments: argparse.Namespace) -> int:
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
    output().print(table(columns, [row for worker in workers for row in _lora_rows(worker)], numbers=["rank"]))
    for worker in workers:
        if worker.problem:
            print(f"{worker.worker_id}: {worker.problem}")
        for rejected in worker.inventory.rejected:
            print(f"{worker.worker_id}: {rejected.name} is rejected: {rejected.reason}")
    return 1 if any(worker.problem for worker in workers) else 0


def _lora_rows(worker: lora_pb2.WorkerLoras) -> list[list[str]]:
    if worker.problem:
        return [[worker.worker_id, "-", "failed", "", ""]]
    states = {"loaded": worker.inventory.loaded, "available": worker.inventory.available}
    rows = [
        [worker.worker_id, adapter.name, state, str(adapter.rank), adapter.digest[:12]]
        for state, adapters in states.items()
        for adapter in adapters
    ]
    return rows or [[worker.worker_id, "-", "none", "", ""]]
