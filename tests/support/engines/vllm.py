"""vLLM's engine for tests, in the environment of `make vllm`. All tests of a run share two, and their event loop:
starting one takes minutes on a busy machine.

With BATON_TEST_DEVICE=cuda both run on one GPU. vLLM computes adapters there in 16 bits only, so
BATON_TEST_VLLM_DTYPE=float16 starts them with adapters, and otherwise they compute in float32 without.
"""

import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp

import pytest
from support.engines.adapters import save_adapter
from support.engines.checkpoints import save_qwen3
from support.engines.device import DEVICE
from support.engines.engine_calls import CONTEXT_TOKENS, MAX_SEQUENCES, MAX_WAITING

from services.engines.base import Engine
from services.engines.context import EngineContext
from services.engines.vllm.config import VllmConfig
from services.engines.vllm.factory import open_vllm

BLOCK_TOKENS = 32
# The pool of the contract, 640 tokens, and vLLM's empty block.
BLOCKS = 640 // BLOCK_TOKENS + 1
# vLLM's attention on CPUs has no smaller heads.
HEAD_DIM = 32
# vLLM's own lease on the blocks of a prefill, and Baton's, which is shorter.
HELD_SECONDS = 15.0
LEASE_SECONDS = 12.0
ADAPTERS = ("first", "second", "third")
ON_GPU = DEVICE == "cuda"
DTYPE = os.environ.get("BATON_TEST_VLLM_DTYPE", "float32")
HAS_ADAPTERS = DTYPE != "float32" or not ON_GPU
LOCAL = {} if ON_GPU else {"ucx_tls": "cma,sm,tcp,self", "ucx_net_devices": "lo"}
# Several engines share a GPU: none measures how much of its memory is left for a pool while others start.
_OF_A_GPU = {"gpu_memory_utilization": 0.06, "kv_cache_memory_bytes": 1 << 30} if ON_GPU else {}


def settings(
    checkpoint: Path, args: Mapping[str, object] | None = None, handoff: Mapping[str, object] | None = None
) -> dict[str, object]:
    """The key `engine` of a worker, for a small model."""
    defaults = {
        **_OF_A_GPU,
        "dtype": DTYPE,
        "enforce_eager": True,
        "max_model_len": CONTEXT_TOKENS,
        "max_num_seqs": MAX_SEQUENCES,
        "max_num_batched_tokens": 256,
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": BLOCKS,
    }
    return {
        "kind": "vllm",
        "model": str(checkpoint),
        "args": {**defaults, **(args or {})},
        "handoff": {"seconds": HELD_SECONDS, "fetch_seconds": LEASE_SECONDS, **LOCAL, **(handoff or {})},
        "max_waiting": MAX_WAITING,
        "guided_decoding": True,
        # Its requests would be counted among those of a test.
        "canary_seconds": None,
        "cpu_kv_cache_gib": 1,
    }


def adapters_of(checkpoint: Path) -> Path:
    """The folder of the adapters of a shared engine."""
    return checkpoint / "adapters"


@contextmanager
def installed() -> Iterator[None]:
    """Skips the test unless vLLM is installed: `make vllm` has it."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed; `make vllm` runs this test")
    yield


class SharedVllm:
    """At most two engines, started when first needed, and lent to one test at a time."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._free: list[Engine] = []
        self._started = 0
        self._folder: Path | None = None

    @asynccontextmanager
    async def lend(self, _which: object = None) -> AsyncIterator[Engine]:
        """An idle engine, of a checkpoint of its own."""
        if not self._free:
            assert self._started < 2, "tests may use two engines of vLLM"
            self._started += 1
            checkpoint = self._checkpoint()
            lora = {"folder": str(adapters_of(checkpoint)), "max_loaded": 2, "max_rank": 8}
            config = VllmConfig.model_validate({**settings(checkpoint), "lora": lora if HAS_ADAPTERS else None})
            self._free.append(await self._stack.enter_async_context(open_vllm(config, EngineContext())))
        engine = self._free.pop(0)
        try:
            yield engine
        finally:
            self._free.insert(0, engine)

    def _checkpoint(self) -> Path:
        if self._folder is None:
            self._folder = save_qwen3(Path(mkdtemp(prefix="baton-vllm-")), HEAD_DIM)
            for seed, name in enumerate(ADAPTERS):
                save_adapter(adapters_of(self._folder) / name, self._folder, seed=seed, rank=4)
        return self._folder

    async def close(self) -> None:
        """Ends the engines."""
        await self._stack.aclose()


SHARED = SharedVllm()
