"""All engines under the contract: one entry in ENGINES each."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from support.engines import sglang, trtllm, vllm
from support.engines.checkpoints import save_llama
from support.engines.device import EXECUTION, ON_DEVICE
from support.engines.engine_calls import BLOCK_TOKENS, BLOCKS, CONTEXT_TOKENS, MAX_SEQUENCES, MAX_WAITING
from support.eventually import eventually

from services.engines.base import Engine
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.simulated.config import SimulatedConfig
from services.engines.simulated.engine import SimulatedEngine


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama, for engines that need a model."""
    return save_llama(tmp_path_factory.mktemp("contract-llama"))


@dataclass(frozen=True, slots=True)
class EngineUnderTest:
    """The opening of one kind of engine, with the sizes in support/engines/engine_calls.py."""

    name: str
    open: Callable[[Path], AbstractAsyncContextManager[Engine]]
    surroundings: Callable[[], AbstractContextManager[object]] = nullcontext
    has_pool: bool = True  # other engines transfer KV themselves, and hold it where tests cannot see it
    block_tokens: int = BLOCK_TOKENS
    allocates_first: bool = False  # so two engines of it hand over by a room only
    is_freed_by_lease: bool = False  # a release frees KV at once, and only Baton's lease keeps a second reader away


def _pytorch(checkpoint: Path, execution: str = EXECUTION) -> AbstractAsyncContextManager[Engine]:
    bytes_of_a_block = 3 * 2 * 2 * BLOCK_TOKENS * 16 * 4
    return PyTorchEngine(
        PyTorchConfig.model_validate(
            {
                **ON_DEVICE,
                "model": checkpoint,
                "execution": execution,
                "kv_cache_bytes": (BLOCKS + 1) * bytes_of_a_block,
                "block_tokens": BLOCK_TOKENS,
                "max_context_tokens": CONTEXT_TOKENS,
                "max_sequences": MAX_SEQUENCES,
                "max_waiting": MAX_WAITING,
                "max_step_tokens": 64,
                "threads": 1,
            }
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
    EngineUnderTest("pytorch-fused", partial(_pytorch, execution="fused")),
    EngineUnderTest("simulated", _simulated),
    *(
        EngineUnderTest(f"trtllm-{version}", trtllm.open_engine, partial(trtllm.trtllm, version), has_pool=False)
        for version in trtllm.VERSIONS
    ),
    pytest.param(
        EngineUnderTest("trtllm-real", trtllm.open_real, trtllm.real, has_pool=False),
        marks=pytest.mark.requires_trtllm,
    ),
    pytest.param(
        EngineUnderTest(
            "vllm",
            vllm.SHARED.lend,
            vllm.installed,
            has_pool=False,
            block_tokens=vllm.BLOCK_TOKENS,
            is_freed_by_lease=True,
        ),
        marks=pytest.mark.requires_vllm,
    ),
    pytest.param(
        EngineUnderTest(
            "sglang",
            lambda _: sglang.SHARED.lend("decode"),
            sglang.installed,
            has_pool=False,
            allocates_first=True,
            block_tokens=sglang.BLOCK_TOKENS,
        ),
        marks=pytest.mark.requires_sglang,
    ),
]


@pytest.fixture(params=ENGINES, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Iterator[EngineUnderTest]:
    found: EngineUnderTest = request.param
    with found.surroundings():
        if found.name in ("sglang", "vllm"):
            request.getfixturevalue(f"end_of_{found.name}")
        yield found


@pytest.fixture
def pool(kind: EngineUnderTest) -> None:
    """For tests of engines with a pool."""
    if not kind.has_pool:
        pytest.skip("this engine moves KV itself: tests/services/engines/contract/test_moving_kv.py")


@pytest.fixture
def moving(kind: EngineUnderTest) -> None:
    """For tests of engines that transfer KV themselves."""
    if kind.has_pool:
        pytest.skip("this engine has a pool: tests/services/engines/contract/test_blocks.py")
    _require_prefill(kind)


@pytest.fixture
def prefilling(kind: EngineUnderTest) -> None:
    """For tests of prefills that wait for a reader."""
    _require_prefill(kind)


def _require_prefill(kind: EngineUnderTest) -> None:
    if kind.allocates_first:
        pytest.skip("this engine's decode side allocates first: tests/services/engines/sglang")


@pytest.fixture
def blocks_of_prompt(kind: EngineUnderTest) -> int:
    """The blocks of a prompt of 50 tokens."""
    return -(-50 // kind.block_tokens)


@pytest.fixture
def freed_by_engine(kind: EngineUnderTest) -> None:
    """For tests of engines that free KV themselves, once it was fetched or after a time."""
    if kind.is_freed_by_lease:
        pytest.skip("this engine's KV is freed by Baton's lease")


@pytest_asyncio.fixture
async def engine(kind: EngineUnderTest, checkpoint: Path) -> AsyncIterator[Engine]:
    """An idle engine. Every test must leave it idle."""
    async with kind.open(checkpoint) as opened:
        yield opened
        if not kind.has_pool:
            # KV that was held and not fetched is freed by the engine's own timeout.
            await eventually(lambda: opened.load().blocks_used == 0)
        assert opened.load().blocks_used == 0
        assert opened.load().running == 0
        assert opened.load().waiting == 0


@pytest.fixture
def seeded(engine: Engine) -> None:
    """For tests of seeds."""
    if "seed" in engine.facts.unsupported_sampling:
        pytest.skip("this engine says that it has no seeds here")


@pytest_asyncio.fixture
async def decoder(kind: EngineUnderTest, checkpoint: Path) -> AsyncIterator[Engine]:
    """A second engine of the same model."""
    _require_prefill(kind)
    async with kind.open(checkpoint) as opened:
        yield opened
        if not kind.has_pool:
            await eventually(lambda: opened.load().blocks_used == 0)
        assert opened.load().blocks_used == 0
