"""One exchange between two GPUs, in a captured graph as in a decode step: by NCCL, and in each other's memory.

    python -m benchmarks.two_gpus.exchange

Each figure is of a graph with 64 of them, as an 8B model's step has, divided by 64; the sums include the RMS norm that
follows. Ranks are processes of their own.
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.two_gpus.report import table
from services.engines.pytorch.kernels.triton_ops import TritonOps
from services.engines.pytorch.parallel.joining import SameHost, join
from services.engines.pytorch.parallel.peer_ranks import PeerRanks
from services.engines.pytorch.parallel.ranks import ExchangeShape, Ranks
from services.engines.pytorch.parallel.shards import Shard

WIDTH, VOCABULARY, TIMES = 4096, 128256, 64
BATCHES = (1, 16, 64, 128)


def per_exchange(work: Callable[[], object]) -> float:
    """Microseconds of one in a graph of TIMES; all ranks call it at the same time."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(TIMES):
            work()
    taken = []
    for _ in range(30):
        torch.cuda.synchronize()
        began = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[5:]) / TIMES * 1e6


def measure(ranks: Ranks, batch: int, device: torch.device) -> tuple[float, float]:
    """A sum with its norm, and the logits' gathering after a sum, less the sum."""
    ops, dtype = TritonOps(), torch.bfloat16
    part, residual = (torch.zeros(batch, WIDTH, dtype=dtype, device=device) for _ in range(2))
    weight = torch.ones(WIDTH, dtype=dtype, device=device)
    logits = torch.zeros(batch, VOCABULARY // 2, dtype=dtype, device=device)

    def add() -> torch.Tensor:
        return ranks.add_and_normalise(ops, part, residual, weight, 1e-5)

    def add_and_gather() -> None:
        add()
        ranks.columns(logits, VOCABULARY)

    added = per_exchange(add)
    return added, per_exchange(add_and_gather) - added


def run(rank: int, meeting: Path, pipe: Connection) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    with torch.inference_mode():
        ranks = join(Shard(rank, 2), SameHost(meeting), device)
        assert isinstance(ranks, PeerRanks)
        nccl = [measure(ranks, batch, device) for batch in BATCHES]
        ranks.prepare(ExchangeShape(max(BATCHES), WIDTH, VOCABULARY // 2, torch.bfloat16))
        direct = [measure(ranks, batch, device) for batch in BATCHES]
    pipe.send((nccl, direct))
    pipe.recv()


def main() -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(2):
            here, there = context.Pipe()
            process = context.Process(target=run, args=(rank, Path(folder) / "meeting", there))
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            nccl, direct = pipes[0].recv()
        finally:
            for process in processes:
                process.kill()
                process.join()
    rows = [
        (batch, before[0], after[0], before[1], after[1], TIMES * (after[0] - before[0]) + after[1] - before[1])
        for batch, before, after in zip(BATCHES, nccl, direct, strict=True)
    ]
    header = ("rows", "sum and norm, NCCL, us", "directly", "logits, NCCL, us", "directly", "a step's difference, us")
    table(header, rows)


if __name__ == "__main__":
    main()
