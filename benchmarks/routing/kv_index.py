"""What an index of KV blocks costs, and what other structures cost that were tried.

    python benchmarks/routing/kv_index.py [--blocks N] [--holders N] [--prompt-blocks N]

Three structures get the same blocks in pieces of one message each: the project's index, a dict from a block to the set
of its holders, and a dict from a block to an int whose bits are its holders. All are asked for the longest match of a
prompt that every holder has a part of. Memory is what the allocations have grown by, with
the keys themselves.
"""

import argparse
import gc
import random
import resource
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from engine_protocol.prefix_hash import block_hashes
from router.routing.prefix.kv_index import KvIndex

PIECE = 1024


class Index(Protocol):
    """What is compared."""

    def store(self, holder: int, keys: Sequence[int]) -> None: ...

    def match(self, keys: Sequence[int]) -> dict[int, int]: ...


class DictOfSets:
    """Plain, and the memory of a set for each block."""

    def __init__(self) -> None:
        self._holders: dict[int, set[int]] = {}

    def store(self, holder: int, keys: Sequence[int]) -> None:
        for key in keys:
            self._holders.setdefault(key, set()).add(holder)

    def match(self, keys: Sequence[int]) -> dict[int, int]:
        counts: dict[int, int] = {}
        alive: set[int] | None = None
        for number, key in enumerate(keys, 1):
            holders = self._holders.get(key, set())
            alive = set(holders) if alive is None else alive & holders
            if not alive:
                break
            counts.update(dict.fromkeys(alive, number))
        return counts


class DictOfBits:
    """An int for each block: less memory, and one operation for all holders."""

    def __init__(self) -> None:
        self._bits: dict[int, int] = {}

    def store(self, holder: int, keys: Sequence[int]) -> None:
        bit = 1 << holder
        bits = self._bits
        for key in keys:
            bits[key] = bits.get(key, 0) | bit

    def match(self, keys: Sequence[int]) -> dict[int, int]:
        counts: dict[int, int] = {}
        alive, number = -1, 0
        for number, key in enumerate(keys):
            now = alive & self._bits.get(key, 0)
            for holder in _bits(alive ^ now if alive >= 0 else 0):
                counts[holder] = number
            alive = now
            if not alive:
                return counts
        counts.update(dict.fromkeys(_bits(alive), number + 1))
        return counts


STRUCTURES: dict[str, Callable[[], Index]] = {
    "the index: 256 dicts of int bitsets": KvIndex[int],
    "dict of sets": DictOfSets,
    "dict of int bitsets": DictOfBits,
}


def _bits(value: int) -> Iterator[int]:
    while value > 0:
        low = value & -value
        yield low.bit_length() - 1
        value ^= low


def messages(blocks: int, holders: int, prompt: Sequence[int]) -> list[tuple[int, Sequence[int]]]:
    """Pieces of all holders' blocks by turns. Each holder also has a part of the prompt."""
    source = random.Random(1)
    keys = [source.getrandbits(64) for _ in range(blocks)]
    parts = [(index % holders, keys[start : start + PIECE]) for index, start in enumerate(range(0, blocks, PIECE))]
    return parts + [(holder, prompt[: len(prompt) * (holder + 1) // holders]) for holder in range(holders)]


def measure(name: str, parts: Sequence[tuple[int, Sequence[int]]], prompt: Sequence[int]) -> str:
    """A row of the table."""
    gc.collect()
    index = STRUCTURES[name]()
    longest, cpu = 0.0, _cpu_seconds()
    for holder, keys in parts:
        started = time.thread_time()
        index.store(holder, keys)
        longest = max(longest, time.thread_time() - started)
    cpu = _cpu_seconds() - cpu
    index.match(prompt)
    times = [_timed(index, prompt) for _ in range(200)]
    assert max(index.match(prompt).values()) == len(prompt)
    del index
    size = _bytes(name, parts)
    size //= sum(len(keys) for _, keys in parts)
    match = statistics.median(times) * 1e6
    return f"| {name} | {cpu:.2f} s | {longest * 1e3:.1f} ms | {match:.0f} us | {size} |"


def _timed(index: Index, prompt: Sequence[int]) -> float:
    started = time.perf_counter()
    index.match(prompt)
    return time.perf_counter() - started


def _bytes(name: str, parts: Sequence[tuple[int, Sequence[int]]]) -> int:
    tracemalloc.start()
    index = STRUCTURES[name]()
    for holder, keys in parts:
        index.store(holder, [key + 0 for key in keys])  # other objects, which the index alone keeps
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--holders", type=int, default=64)
    parser.add_argument("--prompt-blocks", type=int, default=750)
    options = parser.parse_args()
    source = random.Random(2)
    prompt = [source.getrandbits(64) for _ in range(options.prompt_blocks)]
    ids = list(range(16 * options.prompt_blocks))
    started = time.perf_counter()
    block_hashes(ids, 16)
    print(f"hashing {options.prompt_blocks} blocks of 16 tokens: {(time.perf_counter() - started) * 1e6:.0f} us\n")
    print(f"{options.blocks} blocks of {options.holders} holders, a prompt of {options.prompt_blocks} blocks\n")
    print("| structure | building, CPU | longest message, CPU | match | bytes a block |")
    print("|---|---|---|---|---|")
    parts = messages(options.blocks, options.holders, prompt)
    for name in STRUCTURES:
        print(measure(name, parts, prompt), flush=True)


if __name__ == "__main__":
    main()
