"""One NIXL agent with its UCX backend: the part of NIXL that moves blocks."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.errors import ConfigError
from runtime.entropy import token_hex

Bytes = npt.NDArray[np.uint8]

# The meta package last: it imports torch to choose between the others.
_DISTRIBUTIONS = ("nixl_cu13", "nixl_cu12", "nixl")
_BACKEND = "UCX"
# How often an owner's thread wakes without a cause. NIXL's default of 0 spins.
_WAKE_MICROSECONDS = 100_000
_UCX = {
    # Excluded: with it the owner's process would copy blocks into messages, slower than the tcp transport, and UCX 1.23
    # crashes an owner that wakes up to a reader that has ended.
    "engine_config": "PROTO_EMULATION_ENABLE=n",
    # Without it a read from an owner that died never ends.
    "ucx_error_handling_mode": "peer",
}


class NixlFailed(Exception):
    """NIXL failed, or the other agent has ended; the message names NIXL's status."""


@dataclass(frozen=True, slots=True)
class Area:
    """Memory of a process: the host's, or that of the GPU with index `device` in that process."""

    address: int
    num_bytes: int
    device: int | None = None


def area_of(memory: Bytes) -> Area:
    """Returns where an array is."""
    return Area(memory.ctypes.data, memory.nbytes)


@cache
def load_bindings() -> Any:
    """Imports NIXL's own bindings, since its Python API spins, logs to stdout and pickles. Raises ConfigError."""
    for distribution in _DISTRIBUTIONS:
        try:
            return import_module(f"{distribution}._bindings")
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            raise ConfigError(f"transports: {distribution} cannot be loaded: {error}") from error
    raise ConfigError("transports: nixl is not installed: pip install 'baton-serving[nixl]'")


def open_agent(devices: Sequence[str], serves: bool) -> "Agent":
    """Opens a first agent. Raises ConfigError without NIXL, and if UCX cannot use the devices."""
    try:
        return Agent(devices, serves)
    except NixlFailed as error:
        raise ConfigError(f"transport_options.nixl.devices: UCX cannot use {', '.join(devices)}: {error}") from error


class Agent:
    """Registers memory for others, or reads theirs. Its methods block; one thread at a time may call them.

    `devices` are what UCX may use: interfaces, or ports of RDMA adapters. `serves` says whether others read from it:
    then a thread of NIXL answers them. Every method raises NixlFailed.
    """

    def __init__(self, devices: Sequence[str], serves: bool) -> None:
        # Unguessable, and different from that of any earlier process.
        self.name = token_hex(16)
        self._bindings = bindings = load_bindings()
        config = bindings.nixlAgentConfig()
        config.useProgThread = serves
        config.pthrDelay = _WAKE_MICROSECONDS
        config.useListenThread = False
        config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
        # UCX reads it when a backend is made; the backend's own parameters take one device only.
        os.environ["UCX_NET_DEVICES"] = ",".join(devices)
        # Without it UCX reads a GPU's memory of another process only if it sees NVLink.
        os.environ.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")
        with self._reporting():
            self._agent = bindings.nixlAgent(self.name, config)
            defaults, _ = self._agent.getPluginParams(_BACKEND)
            self._backend = [self._agent.createBackend(_BACKEND, {**defaults, **_UCX})]

    def register(self, area: Area) -> None:
        """Lets agents read and write memory, which must stay in place until `close` has returned. For a GPU's memory,
        its context must be that of the calling thread.
        """
        regions = [(area.address, area.num_bytes, area.device or 0, "")]
        with self._reporting():
            self._agent.registerMem(self._bindings.nixlRegDList(self._segment(area), regions), self._backend)

    def metadata(self) -> bytes:
        """Returns what another agent needs to read the memory registered here."""
        with self._reporting():
            return bytes(self._agent.getLocalMD())

    def connect(self, metadata: bytes) -> str:
        """Adds another agent by its metadata, and returns its name."""
        with self._reporting():
            return bytes(self._agent.loadRemoteMD(metadata)).decode(errors="replace")

    def blocks(self, area: Area, block_bytes: int, owner: str = "") -> int:
        """Returns a list of the blocks of an area, here or of `owner`, to choose from by index."""
        count = area.num_bytes // block_bytes
        layout = np.array([[area.address, block_bytes, area.device or 0, block_bytes, count]], np.uint64)
        with self._reporting():
            return int(
                self._agent.prepXferDlist(
                    owner or self._bindings.NIXL_INIT_AGENT, self._segment(area), layout, self._backend
                )
            )

    def begin(self, here: tuple[int, npt.NDArray[np.int32]], there: tuple[int, npt.NDArray[np.int32]]) -> int:
        """Starts to read blocks; each side is a list and indices in it. Over shared memory the read is complete on
        return.
        """
        with self._reporting():
            request = self._agent.makeXferReq(self._bindings.NIXL_READ, *here, *there, "", self._backend)
            self._agent.postXferReq(request)
            return int(request)

    def is_over(self, request: int) -> bool:
        """True if the read is complete. It progresses only while this is called."""
        with self._reporting():
            return bool(self._agent.getXferStatus(request) == self._bindings.NIXL_SUCCESS)

    def forget(self, request: int) -> None:
        """Frees a completed request. An incomplete one would continue to write: only `close` stops it."""
        with self._reporting():
            self._agent.releaseXferReq(request)

    def close(self) -> None:
        """Closes the agent: after that no registered memory is read or written."""
        del self._agent

    def _segment(self, area: Area) -> Any:
        return self._bindings.DRAM_SEG if area.device is None else self._bindings.VRAM_SEG

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        errors = _errors(self._bindings)
        try:
            yield
        except errors as error:
            raise NixlFailed(str(error)) from error


@cache
def _errors(bindings: Any) -> tuple[type[Exception], ...]:
    """NIXL's errors, one for each status; they have no common base class. Its constructor has C++'s."""
    found = vars(bindings).values()
    return (RuntimeError, *(value for value in found if isinstance(value, type) and issubclass(value, Exception)))
