"""The ranks that draw each picture together, with a part of the networks each, as one of them sees them."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import torch

from services.engines.diffusion import Drawing
from services.engines.pytorch.parallel.joining import SameHost, join
from services.engines.pytorch.parallel.ranks import OneRank, Ranks
from services.engines.pytorch.parallel.shards import WHOLE, Shard

REFUSALS = (ValueError, TypeError, LookupError, ArithmeticError, AssertionError)
"""The errors that pipelines raise for options that they cannot draw by, on all ranks alike."""


class Stopped(Exception):
    """Rank 0 draws the batch no further."""


class Group(Protocol):
    """The ranks as one of them sees them. All draw each batch, by the same latents and schedule.

    `failure` says, for good, that they can draw no more.
    """

    shard: Shard

    @property
    def failure(self) -> str | None: ...

    def join(self, device: torch.device) -> Ranks:
        """Meets the others, once this one has loaded. Raises EngineFailed if one of them cannot."""

    def drawing(self, drawings: Sequence[Drawing]) -> AbstractContextManager[None]:
        """Encloses a batch. Raises RuntimeError if the ranks are no longer at the same place after it."""

    def step(self) -> AbstractContextManager[None]:
        """Encloses what is done after a step: what rank 0 raises there ends the batch on all ranks."""

    def close(self) -> None:
        """Ends the other ranks; waits for them, but not for long."""


class Alone:
    """A Group of one."""

    shard = WHOLE
    failure: str | None = None

    def join(self, device: torch.device) -> Ranks:
        """Returns OneRank."""
        del device
        return OneRank()

    @contextmanager
    def drawing(self, drawings: Sequence[Drawing]) -> Iterator[None]:
        """No-op."""
        del drawings
        yield

    @contextmanager
    def step(self) -> Iterator[None]:
        """No-op."""
        yield

    def close(self) -> None:
        """No-op."""


class Follower:
    """A rank above 0 of a Group."""

    failure: str | None = None

    def __init__(self, shard: Shard, meeting: Path, pipe: Connection) -> None:
        self.shard = shard
        self._meeting = meeting
        self._pipe = pipe

    def join(self, device: torch.device) -> Ranks:
        self._pipe.send(None)
        self._device = device
        self._ranks = join(self.shard, SameHost(self._meeting), device)
        return self._ranks

    @contextmanager
    def drawing(self, drawings: Sequence[Drawing]) -> Iterator[None]:
        """Tells rank 0 of the end, and why it is one."""
        del drawings
        reason = ""
        try:
            yield
        except (RuntimeError, *REFUSALS) as error:
            reason = str(error) or repr(error)
        except Stopped:
            pass
        self._pipe.send(reason)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Raises Stopped if rank 0 stops."""
        yield
        stops = torch.empty(1, dtype=torch.int64, device=self._device)
        self._ranks.share(stops)
        if stops.item():
            raise Stopped

    def close(self) -> None:
        """No-op."""
