"""SGLang's engines for tests, where SGLang is installed: one for each side, and two of whole requests. All tests of a
run share them, and their event loop: starting one takes minutes on a busy machine.

On CPUs tests/support/sglang_on_cpus must be in PYTHONPATH, with SGLANG_USE_CPU_ENGINE=1; SGLang
draws by seeds on GPUs only. With BATON_TEST_DEVICE=cuda the engines share one GPU, in bfloat16.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Literal

import pytest
from support.engines.checkpoints import save_qwen3
from support.engines.device import DEVICE
from support.engines.engine_calls import CONTEXT_TOKENS, MAX_SEQUENCES, MAX_WAITING

from services.engines.base import Engine
from services.engines.context import EngineContext
from services.engines.external.surroundings import free_ports
from services.engines.sglang.config import SglangConfig
from services.engines.sglang.factory import open_sglang

ON_GPU = DEVICE == "cuda"
BLOCK_TOKENS = 16 if ON_GPU else 1  # blocks of several tokens are allocated by kernels of Triton
POOL_TOKENS = 640
RESERVED_TOKENS = 16
LEASE_SECONDS = 12.0
HEAD_DIM = 64 if ON_GPU else 16
# Kernels that depend on the size of a batch would give other tokens in 16 bits.
_OF_DEVICE: Mapping[str, object] = (
    {"dtype": "bfloat16", "attention_backend": "triton", "mem_fraction_static": 0.5}
    if ON_GPU
    else {
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "enable_deterministic_inference": False,
        "disable_overlap_schedule": True,
    }
)
Side = Literal["prefill", "decode", "whole", "whole-2"]


def settings(checkpoint: Path, port: int, args: Mapping[str, object] | None = None) -> dict[str, object]:
    """The key `engine` of a worker, for a small model."""
    defaults = {
        **_OF_DEVICE,
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "context_length": CONTEXT_TOKENS,
        "max_running_requests": MAX_SEQUENCES,
        "chunked_prefill_size": 64,
        "page_size": BLOCK_TOKENS,
        "max_total_tokens": POOL_TOKENS,
        "num_reserved_decode_tokens": RESERVED_TOKENS,
    }
    return {
        "kind": "sglang",
        "model": str(checkpoint),
        "args": {**defaults, **(args or {})},
        "handoff": {"port": port, "bootstrap_seconds": 5, "ucx_tls": "" if ON_GPU else "cma,sm,tcp,self"},
        "max_waiting": MAX_WAITING,
        # Its requests would be counted among those of a test.
        "canary_seconds": None,
        # Two engines of one process would register the same metrics.
        "metrics": False,
    }


@contextmanager
def installed() -> Iterator[None]:
    """Skips the test unless SGLang is installed."""
    if find_spec("sglang") is None or find_spec("sglang.srt") is None:
        pytest.skip("SGLang is not installed: docs/sglang.md says how")
    yield


class SharedSglang:
    """The engines, started when first needed, and lent to one test at a time."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._engines: dict[Side, Engine] = {}
        self._folder: Path | None = None
        self._port = 0

    @asynccontextmanager
    async def lend(self, side: Side, *others: Side) -> AsyncIterator[Engine]:
        """The engine of a side. It starts those of the others, too, at the same time."""
        missing = [each for each in (side, *others) if each not in self._engines]
        for each, engine in zip(missing, await asyncio.gather(*map(self._opened, missing)), strict=True):
            self._stack.push_async_exit(engine)
            self._engines[each] = engine
        yield self._engines[side]

    async def _opened(self, side: Side) -> Engine:
        config = {**settings(self.checkpoint, self.port), "whole_requests": side.startswith("whole")}
        context = EngineContext(roles=("prefill" if side == "prefill" else "decode",))
        return await open_sglang(SglangConfig.model_validate(config), context).__aenter__()

    @property
    def checkpoint(self) -> Path:
        """The model of all of them."""
        if self._folder is None:
            self._folder = save_qwen3(Path(mkdtemp(prefix="baton-sglang-")), HEAD_DIM)
        return self._folder

    @property
    def port(self) -> int:
        """Of the bootstrap server."""
        self._port = self._port or free_ports("127.0.0.1", 1)
        return self._port

    async def close(self) -> None:
        """Ends the engines."""
        self._engines.clear()
        await self._stack.aclose()


SHARED = SharedSglang()
