"""The copies of loads and demotions alone, beside one plain pinned copy of the same bytes, and ways to start them."""

import ctypes
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.gpu_transfer import TINY, synchronize
from benchmarks.two_gpus.report import say
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.kv_cache.digester import Digester
from services.engines.pytorch.kv_cache.tiers.host import Copier, pin, unpin, words_of

_ROUNDS = 7
_BYTES = (32 << 20) if TINY else (2 << 30)
_BATCH_BYTES = 32 << 20


def measure_copies(core: EngineCore) -> None:
    """Plain copies, those of a load with digests and without them in turns, and those of a demotion."""
    tiers = core.tiers
    assert tiers is not None
    pool, block_bytes = core.memory.tensor, core.memory.block_bytes
    plain_in, plain_out = _plain(pool.device)
    say("plain pinned copy", to_device_gb_s=plain_in / 1e9, to_host_gb_s=plain_out / 1e9)
    copier = Copier(pool, Digester(block_bytes, pool.device))
    count = min(core.memory.num_blocks - 1, tiers.host.memory.num_blocks, _BYTES // block_bytes)
    batch = min(count, max(1, _BATCH_BYTES // block_bytes))
    count -= count % batch
    rows = tiers.host.words

    def load(*, digests: bool) -> None:
        for start in range(1, 1 + count, batch):
            copier.copy_in(list(rows[start - 1 : start - 1 + batch]), range(start, start + batch))
            if digests:
                copier.digest(range(start, start + batch))
        copier.wait()

    def demote() -> None:
        for start in range(1, 1 + count, batch):
            copier.copy_out(range(start, start + batch), list(rows[start - 1 : start - 1 + batch]))
            copier.digest(range(start, start + batch)).read()

    seconds: dict[str, list[float]] = {"load": [], "load without digests": [], "demotion": []}
    for _ in range(_ROUNDS):
        seconds["load"].append(_seconds(lambda: load(digests=True)))
        seconds["load without digests"].append(_seconds(lambda: load(digests=False)))
        seconds["demotion"].append(_seconds(demote))
    core._pool.clear_cache()
    least = {name: min(each) for name, each in seconds.items()}
    median = {name: sorted(each)[len(each) // 2] for name, each in seconds.items()}
    for name, plain in (("load", plain_in), ("load without digests", plain_in), ("demotion", plain_out)):
        rate = count * block_bytes / median[name]
        say(f"copies of a {name}", gib=count * block_bytes / 2**30, gb_s=rate / 1e9, of_plain=rate / plain)
    say(
        "digests of a load",
        cost_median=median["load"] / median["load without digests"] - 1,
        cost_least=least["load"] / least["load without digests"] - 1,
    )


def _plain(device: torch.device) -> tuple[float, float]:
    """Bytes a second of one pinned copy to the device, and back."""
    host = torch.empty(_BYTES, dtype=torch.uint8)
    pinned = device.type == "cuda" and pin(host)
    there = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    into, back = [], []
    for _ in range(_ROUNDS):
        into.append(_seconds(lambda: there.copy_(host, non_blocking=True)))
        back.append(_seconds(lambda: host.copy_(there, non_blocking=True)))
    if pinned:
        unpin(host)
    return _BYTES / sorted(into)[_ROUNDS // 2], _BYTES / sorted(back)[_ROUNDS // 2]


def _seconds(run: Callable[[], object]) -> float:
    synchronize()
    began = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - began


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: the order of access, hints of where source and destination are, and flags."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


class _Driver:
    """Copies of rows to blocks, started by the driver without PyTorch."""

    def __init__(self, blocks: torch.Tensor, rows: torch.Tensor, block_bytes: int, stream: torch.cuda.Stream) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._first_block, self._first_row = blocks.data_ptr(), rows.data_ptr()
        self._block_bytes = block_bytes
        self._stream = ctypes.c_void_p(stream.cuda_stream)
        self.has_batches = hasattr(self._driver, "cuMemcpyBatchAsync_v2")

    def copy(self, order: Sequence[int]) -> None:
        size = ctypes.c_size_t(self._block_bytes)
        for index, slot in enumerate(order):
            into = ctypes.c_uint64(self._first_block + (index + 1) * self._block_bytes)
            source = ctypes.c_void_p(self._first_row + slot * self._block_bytes)
            self._check(self._driver.cuMemcpyHtoDAsync_v2(into, source, size, self._stream))

    def copy_batch(self, order: Sequence[int]) -> None:
        count, size = len(order), self._block_bytes
        into = (ctypes.c_uint64 * count)(*(self._first_block + (index + 1) * size for index in range(count)))
        sources = (ctypes.c_uint64 * count)(*(self._first_row + slot * size for slot in order))
        sizes = (ctypes.c_size_t * count)(*[size] * count)
        attributes, first = _Attributes(order=1), ctypes.c_size_t(0)
        many = ctypes.c_size_t(count)
        one = ctypes.c_size_t(1)
        self._check(
            self._driver.cuMemcpyBatchAsync_v2(
                into, sources, sizes, many, ctypes.byref(attributes), ctypes.byref(first), one, self._stream
            )
        )

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"the driver refuses a copy: {code}")


def measure_starting(core: EngineCore) -> None:
    """Ways to start the copies of scattered blocks: the time of the thread that starts them, and of all."""
    tiers, pool = core.tiers, core.memory.tensor
    if tiers is None or pool.device.type != "cuda":
        return
    block_bytes = core.memory.block_bytes
    count = min(core.memory.num_blocks - 1, tiers.host.memory.num_blocks, _BYTES // block_bytes)
    blocks, rows = words_of(pool), tiers.host.words
    order = torch.randperm(count).tolist()
    stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
    piece = (2 << 20) // 4

    def pieces() -> None:
        with torch.cuda.stream(stream):
            for index, slot in enumerate(order):
                row, block = rows[slot], blocks[index + 1]
                for start in range(0, len(row), piece):
                    block[start : start + piece].copy_(row[start : start + piece], non_blocking=True)

    def whole() -> None:
        with torch.cuda.stream(stream):
            for index, slot in enumerate(order):
                blocks[index + 1].copy_(rows[slot], non_blocking=True)

    ways: dict[str, Callable[[], None]] = {"pieces of 2 MiB": pieces, "whole blocks": whole}
    driver = _Driver(blocks, rows, block_bytes, stream)
    ways["whole blocks, by the driver"] = lambda: driver.copy(order)
    if driver.has_batches:
        ways["one batch, by the driver"] = lambda: driver.copy_batch(order)
    for name, start in ways.items():
        starting, taken = [], []
        for _ in range(_ROUNDS):
            torch.cuda.synchronize()
            began = time.perf_counter()
            start()
            starting.append(time.perf_counter() - began)
            stream.synchronize()
            taken.append(time.perf_counter() - began)
        middle = _ROUNDS // 2
        rate = count * block_bytes / sorted(taken)[middle]
        say("starting copies", way=name, blocks=count, starting_ms=sorted(starting)[middle] * 1e3, gb_s=rate / 1e9)
    core._pool.clear_cache()
