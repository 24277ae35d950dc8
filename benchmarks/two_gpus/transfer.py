"""Pulls from a pool on GPU 0 into a pool on GPU 1, two processes that see one GPU each; NIXL beside it."""

import argparse
import asyncio
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.gpu_transfer import (
    BLOCK_BYTES,
    MOVED,
    POOL_BYTES,
    ROUNDS,
    memory,
    pull_from,
    serve_pool,
    synchronize,
    transports,
)
from benchmarks.two_gpus.report import see, table

_PATIENCE_SECONDS = 60.0


def owner(gpu: int, block_bytes: int, pipe: Connection) -> None:
    see(gpu)
    asyncio.run(serve_pool(transports()[0], block_bytes, pipe))


def reader(gpu: int, block_bytes: int, endpoint: bytes, pipe: Connection) -> None:
    see(gpu)
    found: list[dict[str, Any]] = []
    asyncio.run(pull_from(transports()[0], block_bytes, endpoint, lambda _what, **row: found.append(row)))
    pipe.send(found)


def through_processes(
    block_bytes: int, first: Callable[..., None], second: Callable[..., None]
) -> list[dict[str, Any]]:
    """Runs the owner on GPU 0, gives what it sends to the reader on GPU 1, and returns what the reader found."""
    context = multiprocessing.get_context("spawn")
    owners, theirs = context.Pipe()
    readers, other = context.Pipe()
    processes = [context.Process(target=first, args=(0, block_bytes, theirs))]
    try:
        processes[0].start()
        theirs.close()
        [endpoint] = received(owners)
        processes.append(context.Process(target=second, args=(1, block_bytes, endpoint, other)))
        processes[1].start()
        other.close()
        found: list[dict[str, Any]] = received(readers)
        return found
    finally:
        for process in processes:
            process.kill()
            process.join()


def received(pipe: Connection) -> Any:
    if not pipe.poll(_PATIENCE_SECONDS):
        raise TimeoutError("a process does not answer")
    return pipe.recv()


def measure(name: str, first: Callable[..., None], second: Callable[..., None]) -> None:
    rows = []
    for block, block_bytes in BLOCK_BYTES.items():
        try:
            found = through_processes(block_bytes, first, second)
        except (EOFError, TimeoutError) as error:
            rows.append((block, f"failed: {type(error).__name__} {error}", "", "", "", "", ""))
            continue
        for row in found:
            if "pull_ms" in row:
                speed = MOVED[row["moved"]] / row["pull_ms"] / 1e6
                rows.append((block, row["moved"], row["pull_ms"], row["p90_ms"], row["least_ms"], speed, row["right"]))
            else:
                rows.append((block, "opening the pool", row["opened_ms"], "", "", "", ""))
    table((f"{name}: blocks of", "moved", "pull, ms", "p90", "least", "GB/s", "all words right"), rows)


def nixl_name() -> str:
    return next((name for name in ("nixl_cu13", "nixl_cu12", "nixl") if find_spec(name)), "")


def nixl_agent(name: str) -> Any:
    """An agent with UCX whose progress thread does not spin."""
    api = __import__(f"{nixl_name()}._api", fromlist=["nixl_agent"])
    return api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))


def nixl_owner(gpu: int, block_bytes: int, pipe: Connection) -> None:
    see(gpu)
    pool = memory(block_bytes)
    words = pool.tensor.view(-1).view(torch.int64)
    torch.arange(len(words), out=words)
    synchronize()
    agent = nixl_agent("owner")
    agent.register_memory([pool.tensor.view(-1)])
    pipe.send([(agent.get_agent_metadata(), pool.tensor.data_ptr())])
    pipe.recv()


def nixl_reader(gpu: int, block_bytes: int, offered: tuple[bytes, int], pipe: Connection) -> None:
    see(gpu)
    pool = memory(block_bytes)
    agent = nixl_agent("reader")
    agent.register_memory([pool.tensor.view(-1)])
    metadata, address = offered
    peer = agent.add_remote_agent(metadata)
    count, kind = POOL_BYTES // block_bytes, "VRAM" if torch.cuda.is_available() else "DRAM"
    sides = [
        agent.prep_xfer_dlist(name, [(base + i * block_bytes, block_bytes, 0) for i in range(count)], mem_type=kind)
        for name, base in (("NIXL_INIT_AGENT", pool.tensor.data_ptr()), (peer, address))
    ]
    found = []
    for moved, size in MOVED.items():
        taken = []
        for _ in range(ROUNDS):
            source, target = (random.sample(range(count), size // block_bytes) for _ in range(2))
            began = time.perf_counter()
            handle = agent.make_prepped_xfer("READ", sides[0], target, sides[1], source)
            state = agent.transfer(handle)
            while state not in ("DONE", "ERR") and time.perf_counter() - began < 30:
                state = agent.check_xfer_state(handle)
            taken.append(time.perf_counter() - began)
            agent.release_xfer_handle(handle)
        synchronize()
        first = pool.tensor.view(count, -1).view(torch.int64)[torch.tensor(target, device=pool.tensor.device), 0].cpu()
        right = state == "DONE" and bool((first == torch.tensor(source) * (block_bytes // 8)).all())
        found.append(summary(moved, taken) | {"right": right})
    pipe.send(found)


def summary(moved: str, taken: list[float]) -> dict[str, Any]:
    used = sorted(one * 1e3 for one in taken[ROUNDS // 6 :])
    return {
        "moved": moved,
        "pull_ms": statistics.median(used),
        "p90_ms": used[int(0.9 * len(used))],
        "least_ms": used[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nixl", action="store_true")
    if not parser.parse_args().nixl:
        measure("cuda_ipc", owner, reader)
    elif nixl_name():
        measure(f"{nixl_name()} from GPU memory", nixl_owner, nixl_reader)
    else:
        print("NIXL is not installed here: not measured.")


if __name__ == "__main__":
    main()
