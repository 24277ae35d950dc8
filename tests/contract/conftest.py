"""Every engine under the contract: one entry in ENGINES each."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from support import trtllm
from support.checkpoints import save_llama
from support.engine_calls import BLOCK_TOKENS, BLOCKS, CONTEXT_TOKENS, MAX_SEQUENCES, MAX_WAITING, until

from services.engine import Engine
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.simulated import SimulatedEngine
from services.engines.simulated_config import SimulatedConfig


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama, for engines that need a model."""
    return save_llama(tmp_path_factory.mktemp("contract-llama"))


@dataclass(frozen=True, slots=True)
class EngineUnderTest:
    """How to open one kind of engine with the sizes in support/engine_calls.py."""

    name: str
    open: Callable[[Path], AbstractAsyncContextManager[Engine]]
    surroundings: Callable[[], AbstractContextManager[object]] = nullcontext
    has_pool: bool = True  # Others move KV themselves, and hold it in nobody's sight.


def _pytorch(checkpoint: Path) -> AbstractAsyncContextManager[Engine]:
    bytes_of_a_block = 3 * 2 * 2 * BLOCK_TOKENS * 16 * 4
    return PyTorchEngine(
        PyTorchConfig(
            model=checkpoint,
            device="cpu",
            kv_cache_bytes=(BLOCKS + 1) * bytes_of_a_block,
            block_tokens=BLOCK_TOKENS,
            max_context_tokens=CONTEXT_TOKENS,
            max_sequences=MAX_SEQUENCES,
            max_waiting=MAX_WAITING,
            max_step_tokens=64,
            threads=1,
        )
    )


def _simulated(_checkpoint: Path) -> AbstractAsyncContextManager[Engine]:
    return SimulatedEngine(
        SimulatedConfig(
            block_tokens=BLOCK_TOKENS,
            num_blocks=BLOCKS,
            max_context_tokens=CONTEXT_TOKENS,
            max_batch=MAX_SEQUENCES,
            max_waiting=MAX_WAITING,
            prefill_chunk_tokens=64,
            prefill_base_seconds=0.002,
        )
    )


ENGINES = [
    EngineUnderTest("pytorch", _pytorch),
    EngineUnderTest("simulated", _simulated),
    *(
        EngineUnderTest(f"trtllm-{version}", trtllm.open_engine, partial(trtllm.trtllm, version), has_pool=False)
        for version in trtllm.VERSIONS
    ),
    pytest.param(
        EngineUnderTest("trtllm-real", trtllm.open_real, trtllm.real, has_pool=False),
        marks=pytest.mark.requires_trtllm,
    ),
]


@pytest.fixture(params=ENGINES, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Iterator[EngineUnderTest]:
    found: EngineUnderTest = request.param
    with found.surroundings():
        yield found


@pytest.fixture
def pool(kind: EngineUnderTest) -> None:
    """For tests of what can only be asked of an engine with a pool."""
    if not kind.has_pool:
        pytest.skip("this engine moves KV itself: tests/contract/test_moving_kv.py")


@pytest.fixture
def moving(kind: EngineUnderTest) -> None:
    """For tests of what can only be asked of an engine that moves KV itself."""
    if kind.has_pool:
        pytest.skip("this engine has a pool: tests/contract/test_blocks.py")


@pytest_asyncio.fixture
async def engine(kind: EngineUnderTest, checkpoint: Path) -> AsyncIterator[Engine]:
    """The engine, with nothing in it. Every test must leave it as it was found."""
    async with kind.open(checkpoint) as opened:
        yield opened
        if not kind.has_pool:
            # What was held and not fetched, until the engine's own timeout.
            await until(lambda: opened.load().blocks_used == 0)
        assert opened.load().blocks_used == 0
        assert opened.load().running == 0
        assert opened.load().waiting == 0


@pytest_asyncio.fixture
async def decoder(kind: EngineUnderTest, checkpoint: Path) -> AsyncIterator[Engine]:
    """A second one of the same model."""
    async with kind.open(checkpoint) as opened:
        yield opened
        if not kind.has_pool:
            await until(lambda: opened.load().blocks_used == 0)
        assert opened.load().blocks_used == 0
