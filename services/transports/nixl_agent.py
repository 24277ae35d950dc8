"""One NIXL agent with its UCX backend: the little of NIXL that moves blocks, with its traps closed."""

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from rpc.errors import ConfigError

Bytes = npt.NDArray[np.uint8]

# The meta package comes last: it looks for torch to choose between the others.
_DISTRIBUTIONS = ("nixl_cu13", "nixl_cu12", "nixl")
_BACKEND = "UCX"
# How often an owner's thread wakes without cause. NIXL's own choice is 0, which spins.
_WAKE_MICROSECONDS = 100_000
_UCX = {
    # The owner's process would copy blocks into messages, slower than the tcp transport does; and UCX 1.23 ends an
    # owner that wakes up to a reader which is gone.
    "engine_config": "PROTO_EMULATION_ENABLE=n",
    # Without it a read from an owner that died never ends.
    "ucx_error_handling_mode": "peer",
}


class NixlFailed(Exception):
    """NIXL refused, or the other agent is gone; the message names NIXL's status."""


@cache
def load_bindings() -> Any:
    """NIXL's own bindings: its Python API spins a core, logs to stdout and pickles. Raises ConfigError without them."""
    for distribution in _DISTRIBUTIONS:
        try:
            return import_module(f"{distribution}._bindings")
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            raise ConfigError(f"transports: {distribution} cannot be loaded: {error}") from error
    raise ConfigError("transports: nixl is not installed: pip install 'baton-serving[nixl]'")


def open_agent(devices: Sequence[str], serves: bool) -> "Agent":
    """The first agent of its kind. Raises ConfigError without NIXL, and if UCX cannot use the devices."""
    try:
        return Agent(devices, serves)
    except NixlFailed as error:
        raise ConfigError(f"nixl.devices: UCX cannot use {', '.join(devices)}: {error}") from error


class Agent:
    """Registers memory for others, or reads theirs. Its methods block, and are for one thread at a time.

    `devices` are what UCX may use: interfaces, or ports of RDMA adapters. `serves` says whether others read from it:
    then a thread of NIXL's answers them. Every method raises NixlFailed.
    """

    def __init__(self, devices: Sequence[str], serves: bool) -> None:
        # Unguessable, and never that of an earlier process.
        self.name = secrets.token_hex(16)
        self._bindings = bindings = load_bindings()
        config = bindings.nixlAgentConfig()
        config.useProgThread = serves
        config.pthrDelay = _WAKE_MICROSECONDS
        config.useListenThread = False
        config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
        # UCX reads it when a backend is made; the backend's own parameters take one device only.
        os.environ["UCX_NET_DEVICES"] = ",".join(devices)
        with self._reporting():
            self._agent = bindings.nixlAgent(self.name, config)
            defaults, _ = self._agent.getPluginParams(_BACKEND)
            self._backend = [self._agent.createBackend(_BACKEND, {**defaults, **_UCX})]

    def register(self, memory: Bytes) -> None:
        """Lets agents read and write memory, which must stay where it is until `close` has returned."""
        regions = [(memory.ctypes.data, memory.nbytes, 0, "")]
        with self._reporting():
            self._agent.registerMem(self._bindings.nixlRegDList(self._bindings.DRAM_SEG, regions), self._backend)

    def metadata(self) -> bytes:
        """What another agent needs to read what is registered here."""
        with self._reporting():
            return bytes(self._agent.getLocalMD())

    def connect(self, metadata: bytes) -> str:
        """Learns of another agent, and returns its name."""
        with self._reporting():
            return bytes(self._agent.loadRemoteMD(metadata)).decode(errors="replace")

    def blocks(self, address: int, num_blocks: int, block_bytes: int, owner: str = "") -> int:
        """A list of blocks that follow one another here, or in the memory of `owner`, to choose from by index."""
        layout = np.array([[address, block_bytes, 0, block_bytes, num_blocks]], np.uint64)
        with self._reporting():
            return int(
                self._agent.prepXferDlist(
                    owner or self._bindings.NIXL_INIT_AGENT, self._bindings.DRAM_SEG, layout, self._backend
                )
            )

    def begin(self, here: tuple[int, npt.NDArray[np.int32]], there: tuple[int, npt.NDArray[np.int32]]) -> int:
        """Begins to read blocks, each side a list and indices in it. Over shared memory it is over by then."""
        with self._reporting():
            request = self._agent.makeXferReq(self._bindings.NIXL_READ, *here, *there, "", self._backend)
            self._agent.postXferReq(request)
            return int(request)

    def is_over(self, request: int) -> bool:
        """Whether all has been read. It gets on only while it is asked."""
        with self._reporting():
            return bool(self._agent.getXferStatus(request) == self._bindings.NIXL_SUCCESS)

    def forget(self, request: int) -> None:
        """Frees a request that is over. One that is not would go on writing: only `close` stops it."""
        with self._reporting():
            self._agent.releaseXferReq(request)

    def close(self) -> None:
        """Ends the agent: nothing is read from or written to registered memory any more."""
        del self._agent

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        errors = _errors(self._bindings)
        try:
            yield
        except errors as error:
            raise NixlFailed(str(error)) from error


@cache
def _errors(bindings: Any) -> tuple[type[Exception], ...]:
    """NIXL's errors, one for each status; they have no base class of their own. Its constructor has C++'s."""
    found = vars(bindings).values()
    return (RuntimeError, *(value for value in found if isinstance(value, type) and issubclass(value, Exception)))
