"""The tier in host memory, and the copies between host memory and the pool."""

import mmap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import structlog
import torch

from services.engines.kv import KvLayout
from services.engines.pytorch.kv_cache.digester import Digester, Digests
from services.engines.pytorch.kv_cache.memory import HostMemory
from services.engines.seals import SEAL_BYTES

log = structlog.get_logger(__name__)

# A copy of at most 8 MiB at once, so that the link and the memory are never taken from steps for long.
_PIECE_WORDS = (8 << 20) // 4


class HostRegion:
    """The slots of the tier in host memory: the same shared memory as a pool on a CPU, pinned for a GPU; and seals."""

    def __init__(self, layout: KvLayout, num_slots: int, device: torch.device) -> None:
        self.memory = HostMemory(layout, num_slots)
        self.words = words_of(self.memory.tensor)
        self.seals = mmap.mmap(-1, num_slots * SEAL_BYTES)
        self._pinned = device.type == "cuda" and pin(self.words)

    def seal(self, slot: int) -> bytes:
        """The seal of a slot."""
        return self.seals[slot * SEAL_BYTES : (slot + 1) * SEAL_BYTES]

    def set_seal(self, slot: int, seal: bytes) -> None:
        """Sets the seal of a slot, once its block is complete; no bytes before it is written."""
        self.seals[slot * SEAL_BYTES : (slot + 1) * SEAL_BYTES] = seal.ljust(SEAL_BYTES, b"\0")

    def close(self) -> None:
        """Frees the memory. Nothing copies any more."""
        if self._pinned:
            unpin(self.words)
        self.memory.close()


class Copier:
    """Copies blocks between the pool and rows of host memory, and digests those in the pool.

    Each thread has one, with streams of the lowest priority. Digests are computed beside the copies that follow them.
    """

    def __init__(self, pool: torch.Tensor, digester: Digester) -> None:
        self._pool = words_of(pool)
        self._digester = digester
        self._copies, self._digests = _stream(pool.device), _stream(pool.device)

    @property
    def device(self) -> torch.device:
        """The pool's device."""
        return self._pool.device

    def copy_out(self, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """Starts copies from the pool."""
        self._copy([self._pool[block] for block in blocks], rows)

    def copy_in(self, rows: Sequence[torch.Tensor], blocks: Sequence[int]) -> None:
        """Starts copies into the pool."""
        self._copy(rows, [self._pool[block] for block in blocks])

    def digest(self, blocks: Sequence[int]) -> Digests:
        """Starts to digest blocks of the pool, once the copies before have ended. Copies that follow do not wait."""
        if self._digests is None or self._copies is None:
            return self._digester.begin(self._pool, blocks)
        self._digests.wait_stream(self._copies)
        with torch.cuda.stream(self._digests):
            return self._digester.begin(self._pool, blocks)

    def wait(self) -> None:
        """Waits for everything that was started. Any thread may call it."""
        for stream in (self._copies, self._digests):
            if stream is not None:
                stream.synchronize()

    def _copy(self, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
        # One call for all: each takes the interpreter from the thread of the engine.
        with _on(self._copies):
            torch._foreach_copy_(_pieces(destinations), _pieces(sources), non_blocking=True)


def _pieces(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if len(rows[0]) <= _PIECE_WORDS:
        return list(rows)
    return [piece for row in rows for piece in torch.split(row, _PIECE_WORDS)]


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device, priority=0)  # type: ignore[no-untyped-call]  # 0 is the lowest


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def words_of(blocks: torch.Tensor) -> torch.Tensor:
    """Returns blocks as `[blocks, words]` of 32 bits, in the same memory."""
    return blocks.view(len(blocks), -1).view(torch.int32)


def pin(words: torch.Tensor) -> bool:
    """Pins host memory, so that the device copies from it at full speed; False, with a warning, if it cannot be."""
    error = int(torch.cuda.cudart().cudaHostRegister(words.data_ptr(), words.numel() * words.itemsize, 0))  # type: ignore[no-untyped-call]
    if error:
        log.warning("host memory cannot be pinned; transfers are slower", reason=f"CUDA error {error}")
    return not error


def unpin(words: torch.Tensor) -> None:
    """Releases memory that was pinned."""
    torch.cuda.cudart().cudaHostUnregister(words.data_ptr())  # type: ignore[no-untyped-call]


@contextmanager
def computing_nothing(device: torch.device) -> Iterator[None]:
    """Prepares a thread for copies: the pool's tensors belong to inference mode, and to a device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with torch.inference_mode():
        yield
