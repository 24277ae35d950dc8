"""The meeting of a model's ranks: by a file of their host, or by a store of rank 0's."""

import ctypes
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from services.engines.pytorch.parallel.peer_ranks import PeerRanks
from services.engines.pytorch.parallel.ranks import ProcessRanks, Ranks
from services.engines.pytorch.parallel.shards import Shard


@dataclass(frozen=True, slots=True)
class SameHost:
    """Ranks that meet by a file of their host, which does not exist before."""

    file: Path


@dataclass(frozen=True, slots=True)
class SeveralHosts:
    """Ranks that meet by a store of rank 0's at `host` and `port`; `own_address` is where the others reach this one.

    On rank 0 `store` is the store itself.
    """

    host: str
    port: int
    own_address: str
    store: Any = None


Meeting = SameHost | SeveralHosts

START_SECONDS = 120.0
"""The longest time that a rank waits for the others to join."""
STEP_SECONDS = 60.0
"""The longest time that a rank on a CPU waits for the others in a step. On GPUs the end of a rank is noticed by its
process, and a rank that hangs by the engine's stall detection.
"""


def open_store(host: str, size: int) -> SeveralHosts:
    """Opens the store of a group's rank 0, at a free port of the address `host`."""
    library: Any = torch.distributed
    store = library.TCPStore(
        host, 0, size, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=START_SECONDS)
    )
    return SeveralHosts(host, store.port, host, store)


def join(shard: Shard, meeting: Meeting, device: torch.device) -> Ranks:
    """Joins the other ranks, which all name the same meeting. Raises RuntimeError after START_SECONDS."""
    store = _store(meeting, shard)
    store.set_timeout(timedelta(seconds=START_SECONDS))
    if device.type == "cuda":
        group = _nccl(store, shard)
        # For good: at the end of a process, its destructor waits for the other ranks, or ends the process by SIGABRT.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    else:
        group = _gloo(store, shard, meeting.own_address if isinstance(meeting, SeveralHosts) else "127.0.0.1")
    ranks = ProcessRanks(group, shard.size)
    # NCCL connects in its first operation, which a graph must not capture.
    ranks.add_up(torch.zeros(1, device=device))
    if device.type == "cuda" and isinstance(meeting, SameHost):
        return PeerRanks(ranks, store, shard, device)
    return ranks


def _store(meeting: Meeting, shard: Shard) -> Any:
    library: Any = torch.distributed
    match meeting:
        case SameHost(file):
            return library.FileStore(str(file), shard.size)
        case SeveralHosts(host, port, _, store):
            wait = timedelta(seconds=START_SECONDS)
            return store or library.TCPStore(host, port, shard.size, is_master=False, timeout=wait)


def _gloo(store: Any, shard: Shard, own_address: str) -> Any:
    from torch.distributed import ProcessGroupGloo

    kind: Any = ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname=own_address)]
    options._timeout = timedelta(seconds=STEP_SECONDS)
    return kind(store, shard.rank, shard.size, options)


def _nccl(store: Any, shard: Shard) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=START_SECONDS)
    return ProcessGroupNCCL(store, shard.rank, shard.size, options)
