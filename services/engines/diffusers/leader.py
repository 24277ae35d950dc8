"""Rank 0 of the processes that draw each picture together, the engine's, which decides; and what the others run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from baton.errors import BatonError, ConfigError, EngineFailed
from services.engines.diffusers.config import DiffusionConfig
from services.engines.diffusers.pipeline import Pipeline, check_split, pipeline_class
from services.engines.diffusers.ranks import Alone, Follower, Group
from services.engines.diffusion import Drawing
from services.engines.pytorch.model.loading import device_named
from services.engines.pytorch.parallel.followers import LOAD_SECONDS
from services.engines.pytorch.parallel.processes import RankProcesses, enter_process, leave_process
from services.engines.pytorch.parallel.ranks import Ranks
from services.engines.pytorch.parallel.shards import FIELD, Shard

_END_SECONDS = 30.0
"""The longest time that rank 0 waits for another rank's end of a batch after its own."""


class Leader:
    """Rank 0 of a Group, which starts the others' processes."""

    def __init__(self, config: DiffusionConfig) -> None:
        size = config.tensor_parallel_size
        if device_named(config.device).type == "cuda" and torch.cuda.device_count() < size:
            found = torch.cuda.device_count()
            raise ConfigError(f"{FIELD}: {size} GPUs are needed, and this process sees {found}")
        pipeline_class(config.model)
        check_split(config.model, size)
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


def open_group(config: DiffusionConfig) -> Group:
    """Returns the group, as its first rank."""
    return Alone() if config.tensor_parallel_size == 1 else Leader(config)


def follow(shard: Shard, config: DiffusionConfig, meeting: Path, pipe: Connection) -> None:
    """Draws what rank 0 draws, until it says that this is the end, or ends."""
    enter_process()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = device_named(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", shard.rank)
        torch.cuda.set_device(device)
    with torch.inference_mode(), suppress(EOFError, OSError):  # rank 0 has ended
        try:
            pipeline = Pipeline(config, device, Follower(shard, meeting, pipe))
        except (BatonError, RuntimeError) as error:
            pipe.send(str(error))
            return
        while (drawings := pipe.recv()) is not None:
            pipeline.follow(drawings)
    if device.type == "cuda":
        leave_process()
