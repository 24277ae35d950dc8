"""The process of a rank above 0 that rank 0 has started on its host. It registers nowhere and serves nothing."""

import logging
import mmap
import multiprocessing
import os
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path

import structlog
import torch

from baton.errors import BatonError
from services.engines.kv import KvLayout
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.kv_cache.memory import DTYPES, DeviceMemory, block_shape
from services.engines.pytorch.kv_cache.pool_size import layout_of
from services.engines.pytorch.model.loading import LoadedModel, choose_device
from services.engines.pytorch.parallel.follower import load_part, obey
from services.engines.pytorch.parallel.joining import SameHost, join
from services.engines.pytorch.parallel.messages import Begin
from services.engines.pytorch.parallel.shards import Shard, part_of_pool
from services.engines.pytorch.runners.fused_runner import FusedRunner
from services.engines.pytorch.runners.selection import fused_runner

_log = structlog.get_logger(__name__)


def follow(shard: Shard, config: PyTorchConfig, meeting: Path, pipe: Connection) -> None:
    """Runs until rank 0 says so, or ends. Rank 0 decides when: signals that whole process groups get are ignored."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    _end_with_parent()
    _log_to_stderr()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if choose_device(config).type == "cuda":
        torch.cuda.set_device(shard.rank)
    with torch.inference_mode():
        try:
            loaded = load_part(shard, config, pipe)
        except (BatonError, RuntimeError, OSError):  # rank 0 has been told
            return
        runner, pool = _begin(loaded, config, meeting, pipe)
        with suppress(EOFError):
            obey(runner, pool, shard, pipe, _Silent())
    sys.stderr.flush()
    os._exit(0)  # NCCL would wait for the other ranks


class _Silent:
    """A RankProgress of a process without metrics of its own."""

    is_ready = False

    def loaded(self, seconds: float) -> None:
        """No-op."""

    def ready(self) -> None:
        """No-op."""

    def stepped(self, tokens: int) -> None:
        """No-op."""


def _end_with_parent() -> None:
    """Ends this process when rank 0's has ended, also amid an operation that waits for rank 0."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="baton-parent", daemon=True).start()


def _log_to_stderr() -> None:
    level = structlog.make_filtering_bound_logger(logging.WARNING)
    structlog.configure(wrapper_class=level, logger_factory=structlog.PrintLoggerFactory(sys.stderr))


def _begin(
    model: LoadedModel, config: PyTorchConfig, meeting: Path, pipe: Connection
) -> tuple[FusedRunner, torch.Tensor]:
    begin = pipe.recv()
    assert isinstance(begin, Begin)
    layout = layout_of(config, model)
    if model.shard.shares_pool:
        pool = part_of_pool(_mapped(layout, begin.num_blocks, reduction.recv_handle(pipe)), model.shard)
    else:
        pool = DeviceMemory(layout, begin.num_blocks, model.device).tensor
    ranks = join(model.shard, SameHost(meeting), model.device)
    return fused_runner(model, pool, begin.sizes, ranks), pool


def _mapped(layout: KvLayout, blocks: int, descriptor: int) -> torch.Tensor:
    """Maps rank 0's pool."""
    mapping = mmap.mmap(descriptor, blocks * layout.block_bytes)
    os.close(descriptor)
    return torch.frombuffer(mapping, dtype=DTYPES[layout.dtype]).view(blocks, *block_shape(layout))
