"""The processes that draw each picture together, with a part of the networks each; rank 0, the engine's, decides."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import torch

from baton.errors import ConfigError, EngineFailed
from services.engines.diffusers.config import DiffusionConfig
from services.engines.diffusion import Drawing
from services.engines.pytorch.model.loading import device_named
from services.engines.pytorch.parallel.followers import LOAD_SECONDS
from services.engines.pytorch.parallel.joining import SameHost, join
from services.engines.pytorch.parallel.processes import Follow, RankProcesses
from services.engines.pytorch.parallel.ranks import OneRank, Ranks
from services.engines.pytorch.parallel.shards import FIELD, WHOLE, Shard

_END_SECONDS = 30.0
"""The longest time that rank 0 waits for another rank's end of a batch after its own."""

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


class Leader:
    """Rank 0 of a Group, which starts the others' processes."""

    def __init__(self, config: DiffusionConfig, follow: Follow) -> None:
        size = config.tensor_parallel_size
        if device_named(config.device).type == "cuda" and torch.cuda.device_count() < size:
            found = torch.cuda.device_count()
            raise ConfigError(f"{FIELD}: {size} GPUs are needed, and this process sees {found}")
        self.shard = Shard(0, size)
        self._processes = RankProcesses(follow, config, [Shard(rank, size) for rank in range(1, size)])
        self._out_of_step: str | None = None

    @property
    def failure(self) -> str | None:
        return self._processes.failure or self._out_of_step

    def join(self, device: torch.device) -> Ranks:
        for rank in self._processes.all:
            if reason := self._processes.receive(rank, LOAD_SECONDS, "load the model"):
                raise EngineFailed(f"rank {rank.rank} cannot load the model: {reason}")
        self._device = device
        self._ranks = self._processes.join(self.shard, device)
        return self._ranks

    @contextmanager
    def drawing(self, drawings: Sequence[Drawing]) -> Iterator[None]:
        if self.failure is not None:
            raise RuntimeError(self.failure)
        self._processes.send_all(tuple(drawings))
        has_drawn = False
        try:
            yield
            has_drawn = True
        finally:
            self._end(has_drawn)

    def _end(self, has_drawn: bool) -> None:
        """Waits for the others. An error of theirs is expected where rank 0 has one, too."""
        for rank in self._processes.all:
            try:
                reason = self._processes.receive(rank, _END_SECONDS, "end a batch")
            except EngineFailed as error:
                self._out_of_step = error.message
                raise RuntimeError(self.failure) from error
            if reason and has_drawn:
                self._out_of_step = f"rank {rank.rank} cannot draw what rank 0 can: {reason}"
                raise RuntimeError(self.failure)

    @contextmanager
    def step(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._tell(1)
            raise
        self._tell(0)

    def _tell(self, stops: int) -> None:
        self._ranks.share(torch.tensor([stops], device=self._device))

    def close(self) -> None:
        self._processes.close()


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


def open_group(config: DiffusionConfig, follow: Follow) -> Group:
    """Returns the group, as its first rank. The others run `follow`."""
    return Alone() if config.tensor_parallel_size == 1 else Leader(config, follow)
