"""The GPUs of this machine, how fast a large copy moves between them, and whether processes that see one each share."""

import argparse
import statistics
import time
from pathlib import Path

import torch
import transformers

from benchmarks.gpu_transfer import TINY
from benchmarks.two_gpus.report import table
from benchmarks.two_gpus.transfer import owner, reader, through_processes

MARK = "see-both"
"""A file of this name is left where processes must see both GPUs to map each other's memory."""


def copied(size: int) -> float:
    """Milliseconds of one contiguous copy from GPU 0 to GPU 1, launch to done."""
    source = torch.ones(size, dtype=torch.uint8, device="cuda:0")
    target = torch.empty(size, dtype=torch.uint8, device="cuda:1")
    taken = []
    for _ in range(20):
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[5:]) * 1e3


def probe(output: Path | None) -> None:
    """Tries a pull between two processes that see one GPU each."""
    try:
        right = all(row.get("right", True) for row in through_processes(1 << 20, owner, reader))
        print(f"* a pull between processes that see one GPU each: {'right' if right else 'WRONG WORDS'}\n")
    except (EOFError, TimeoutError) as error:
        print(
            f"* a pull between processes that see one GPU each fails ({type(error).__name__}): below, they see both\n"
        )
        if output is not None:
            (output / MARK).touch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.cuda.device_count()} GPUs")
    if TINY or torch.cuda.device_count() < 2:
        print("\nNo two GPUs: the sizes are tiny, and no figure below means anything.")
        probe(options.output)
        return
    for index in range(2):
        found = torch.cuda.get_device_properties(index)
        print(f"* GPU {index}: {found.name}, {found.total_memory / 2**30:.0f} GiB, {found.multi_processor_count} SMs")
    print(f"* peer access: {torch.cuda.can_device_access_peer(0, 1)}, {torch.cuda.can_device_access_peer(1, 0)}")
    probe(options.output)
    sizes = {"16 MiB": 16 << 20, "500 MiB": 500 << 20, "1 GiB": 1 << 30}
    rows = [(name, ms := copied(size), size / ms / 1e6) for name, size in sizes.items()]
    table(("one copy, GPU 0 to GPU 1", "ms", "GB/s"), rows)


if __name__ == "__main__":
    main()
