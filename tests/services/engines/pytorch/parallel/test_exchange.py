"""The kernels by which ranks exchange rows compute the same as plain PyTorch, with equal bits on all ranks.

On two GPUs, each rank in a process of its own; or on a CPU in Triton's interpreter, which TRITON_INTERPRET=1 enables,
with regions in shared memory. There is neither in CI.
"""

import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines.device import DEVICE

from services.engines.pytorch.kernels.paged_ops import TorchOps
from services.engines.pytorch.parallel.peer_memory import PeerMemory, lay_out, open_peer_memory, peer_memory
from services.engines.pytorch.parallel.peer_ranks import Exchange, chunks_of
from services.engines.pytorch.parallel.ranks import ExchangeShape
from services.engines.pytorch.parallel.shards import Shard

needs_kernels = pytest.mark.skipif(
    find_spec("triton") is None
    or (DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1")
    or (DEVICE == "cuda" and torch.cuda.device_count() < 2),
    reason="there are neither two GPUs nor TRITON_INTERPRET=1",
)

RANKS = 2
SHAPE = ExchangeShape(rows=8, width=48, columns=5000, dtype=torch.float32)
VOCABULARY = 9990  # less than the columns of two ranks: the last are padding
# The numbers of rows of calls that follow one another, so that rows rest for some turns.
STEPS = (1, 8, 3, 3, 1, 8, 8)
EPS = 1e-5


@dataclass(frozen=True)
class Results:
    """The result of one rank in a step."""

    shared: torch.Tensor
    summed: torch.Tensor
    residual: torch.Tensor
    normal: torch.Tensor
    columns: torch.Tensor


@dataclass(frozen=True)
class Numbers:
    """The input of a rank's step. Residual and weight are the same on all ranks."""

    part: torch.Tensor
    logits: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor


def numbers(rank: int, step: int, rows: int) -> Numbers:
    own, common = torch.Generator().manual_seed(100 * step + rank), torch.Generator().manual_seed(100 * step + 99)
    return Numbers(
        torch.randn(rows, SHAPE.width, generator=own),
        torch.randn(rows, SHAPE.columns, generator=own),
        torch.randn(rows, SHAPE.width, generator=common),
        torch.randn(SHAPE.width, generator=common),
    )


def exchanged(exchange: Exchange, given: Numbers) -> Results:
    shared, summed, residual = given.part.clone(), given.part.clone(), given.residual.clone()
    exchange.share(shared)
    exchange.add_up(summed)
    normal = exchange.add_and_normalise(given.part, residual, given.weight, EPS)
    return Results(shared, summed, residual, normal, exchange.columns(given.logits, VOCABULARY))


def moved(results: Any, device: str) -> Any:
    return type(results)(**{name: value.to(device) for name, value in vars(results).items()})


def run_rank(rank: int, regions: list[torch.Tensor], meeting: str, pipe: Connection) -> None:
    """Sends the results of all steps; on GPUs also those of captured graphs, replayed."""
    device = "cpu" if DEVICE == "cpu" else f"cuda:{rank}"
    exchange = Exchange(memory_of(rank, regions, meeting), SHAPE, rank, RANKS)
    exchange.warm_up()
    for step, rows in enumerate(STEPS):
        pipe.send(moved(exchanged(exchange, moved(numbers(rank, step, rows), device)), "cpu"))
    if DEVICE == "cuda":
        graphed(exchange, rank, device, pipe)
    pipe.recv()


def graphed(exchange: Exchange, rank: int, device: str, pipe: Connection) -> None:
    given = moved(numbers(rank, 0, SHAPE.rows), device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = exchanged(exchange, given)
    for step in range(200):
        for name, value in vars(moved(numbers(rank, step, SHAPE.rows), device)).items():
            getattr(given, name).copy_(value)
        graph.replay()
        if step % 20 == 19:
            pipe.send(moved(found, "cpu"))


def memory_of(rank: int, regions: list[torch.Tensor], meeting: str) -> PeerMemory:
    if DEVICE == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        store: Any = torch.distributed.FileStore(meeting, RANKS)
        store.set_timeout(timedelta(seconds=60))
        opened = open_peer_memory(store, Shard(rank, RANKS), device, SHAPE, chunks_of(SHAPE))
        assert opened is not None
        return opened
    offsets = [region.data_ptr() - regions[rank].data_ptr() for region in regions]
    return peer_memory(regions[rank], offsets, SHAPE, chunks_of(SHAPE), torch.zeros(1, dtype=torch.int32))


@pytest.fixture
def pipes(tmp_path: Path) -> Iterator[list[Connection]]:
    """The ends of pipes to all ranks."""
    import torch.multiprocessing  # its reductions: processes can be given tensors in shared memory

    size, _ = lay_out(SHAPE, RANKS, chunks_of(SHAPE))
    regions = [torch.zeros(size, dtype=torch.uint8).share_memory_() for _ in range(RANKS)] if DEVICE == "cpu" else []
    context = multiprocessing.get_context("spawn")
    ours, processes = [], []
    for rank in range(RANKS):
        here, there = context.Pipe()
        process = context.Process(target=run_rank, args=(rank, regions, str(tmp_path / "meeting"), there))
        process.start()
        there.close()
        ours.append(here)
        processes.append(process)
    yield ours
    for process in processes:
        process.kill()
        process.join()


def received(pipes: list[Connection]) -> list[Results]:
    assert all(pipe.poll(120) for pipe in pipes)
    return [pipe.recv() for pipe in pipes]


def check(found: list[Results], step: int, rows: int) -> None:
    given = [numbers(rank, step, rows) for rank in range(RANKS)]
    for name in ("shared", "summed", "residual", "normal"):
        assert all(torch.equal(getattr(a, name), getattr(b, name)) for a, b in pairwise(found)), (name, step)
    assert torch.equal(found[0].shared, given[0].part)
    assert torch.equal(found[0].summed, given[0].part + given[1].part)
    residual = given[0].residual.clone()
    normal = TorchOps().rms_norm(given[0].part + given[1].part, residual, given[0].weight, EPS)
    assert torch.equal(found[0].residual, residual)
    assert torch.allclose(found[0].normal, normal, atol=1e-5)
    assert torch.equal(found[0].columns, torch.cat([each.logits for each in given], dim=1)[:, :VOCABULARY])


@needs_kernels
@pytest.mark.timeout(300)
def test_rows_are_added_shared_normalised_and_gathered_in_any_order_of_sizes(pipes: list[Connection]) -> None:
    for step, rows in enumerate(STEPS):
        check(received(pipes), step, rows)
    for step in range(19, 200, 20) if DEVICE == "cuda" else ():
        check(received(pipes), step, SHAPE.rows)


def test_the_parts_of_a_region_do_not_overlap_and_are_aligned() -> None:
    size, _ = lay_out(SHAPE, RANKS, chunks_of(SHAPE))
    region = torch.zeros(size, dtype=torch.uint8)
    memory = peer_memory(region, [0] * RANKS, SHAPE, chunks_of(SHAPE), torch.zeros(1, dtype=torch.int32))
    parts = (memory.rows.data, memory.rows.flags, memory.columns.data, memory.columns.flags)
    ends = [part.data_ptr() - region.data_ptr() + part.nbytes for part in parts]
    starts = [part.data_ptr() - region.data_ptr() for part in parts]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert ends[-1] <= size
    assert [start % 512 for start in starts] == [0] * len(parts)
    assert [part.numel() for part in parts] == [2 * 2 * 8 * 48, 2 * 8, 2 * 8 * 5000, 2 * 8 * 2]


def test_what_is_too_large_or_of_another_kind_is_left_to_other_operations() -> None:
    exchange = Exchange.__new__(Exchange)
    exchange._shape = SHAPE
    assert exchange.adds(torch.zeros(8, 48))
    assert exchange.gathers(torch.zeros(1, 5000))
    others = (torch.zeros(9, 48), torch.zeros(0, 48), torch.zeros(8, 47), torch.zeros(8, 48).half(), torch.zeros(1))
    assert not any(exchange.adds(each) for each in (*others, torch.zeros(48, 8).T))
