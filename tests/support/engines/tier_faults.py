"""Operations of the KV tiers that fail, as a device, a link or a disk does."""

import random
import resource
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from services.engines.pytorch.kv_cache.digester import Digests
from services.engines.pytorch.kv_cache.tiers.disk import Buffer, DiskFile
from services.engines.pytorch.kv_cache.tiers.host import Copier, HostRegion

Step = tuple[type, str, type[Exception]]

# Of a demotion, a spill, a write and a load, with the error that each can end with.
STEPS: Sequence[Step] = (
    (Copier, "copy_out", RuntimeError),
    (Copier, "digest", RuntimeError),
    (Digests, "read", RuntimeError),
    (Copier, "copy_in", RuntimeError),
    (Copier, "wait", RuntimeError),
    (HostRegion, "seal", RuntimeError),
    (HostRegion, "set_seal", RuntimeError),
    (Buffer, "set_seal", RuntimeError),
    (DiskFile, "write", OSError),
    (DiskFile, "read", OSError),
    # Neither the device's nor the disk's.
    (Copier, "copy_out", MemoryError),
    (Copier, "wait", MemoryError),
    (Buffer, "set_seal", OSError),
)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Lets no file of this process grow beyond so many bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def failing_now_and_then(
    monkeypatch: pytest.MonkeyPatch, steps: Sequence[Step], *, share: float, seed: int = 5
) -> Counter[str]:
    """Lets this share of the calls of the tiers' threads do what they should, and then fail; counts these."""
    chance, failures = random.Random(seed), Counter[str]()
    for kind, name, error in steps:
        monkeypatch.setattr(kind, name, _failing(kind, name, error, share, chance, failures))
    return failures


def _failing(
    kind: type, name: str, error: type[Exception], share: float, chance: random.Random, failures: Counter[str]
) -> object:
    plain = getattr(kind, name)

    def run(self: object, *arguments: object) -> object:
        result = plain(self, *arguments)
        if threading.current_thread().name.startswith("baton-kv-") and chance.random() < share:
            failures[f"{kind.__name__}.{name}"] += 1
            raise error("it has failed")
        return result

    return run
