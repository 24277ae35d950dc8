"""Two workers that both prefill and decode hand over to one another, with pools that a few prompts fill."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
from support.clients.generation import Answer, generate, greedy_ids
from support.cluster.in_process import PATIENT, Bench, bench, eventually
from support.engines.checkpoints import save_llama
from support.eventually import PATIENCE_SECONDS
from support.lifetimes import in_one_task

from router.config import RoutingConfig
from services.config import HandoffConfig, WorkerConfig
from services.engines.context import EngineConfig
from services.engines.pytorch.config import PyTorchConfig
from services.engines.simulated.config import SimulatedConfig

POOL_BLOCKS = 16
BLOCK_TOKENS = 16
REQUESTS = 8
ANSWER_TOKENS = 24


def _simulated(_: Path) -> SimulatedConfig:
    return SimulatedConfig(
        name="demo", num_blocks=POOL_BLOCKS, block_tokens=BLOCK_TOKENS, block_bytes=1024, decode_step_seconds=0.005
    )


def _pytorch(folder: Path) -> PyTorchConfig:
    bytes_of_a_block = 3 * 2 * 2 * BLOCK_TOKENS * 16 * 4
    return PyTorchConfig(
        model=save_llama(folder),
        name="demo",
        device="cpu",
        kv_cache_bytes=(POOL_BLOCKS + 1) * bytes_of_a_block,
        block_tokens=BLOCK_TOKENS,
        max_context_tokens=POOL_BLOCKS * BLOCK_TOKENS,
        threads=1,
    )


# A session stays with its decode worker, so that a test decides which way each request crosses.
ROUTER = PATIENT.model_copy(update={"routing": RoutingConfig(policy="least_loaded", session_slack=1000)})


@dataclass(frozen=True)
class Pair:
    """A router and two workers of both roles, and sessions of which one half decodes here, the other half there."""

    cluster: Bench
    sessions: list[str] = field(default_factory=list)

    async def find_sessions(self) -> None:
        found: Counter[str] = Counter()
        for name in map(str, itertools.count()):
            decode = (await self.ask(name, 4, 3)).started.decode_worker_id
            if found[decode] < REQUESTS // 2:
                found[decode] += 1
                self.sessions.append(name)
            if len(self.sessions) == REQUESTS:
                return

    async def ask_all(self, prompt_tokens: int) -> list[tuple[int, ...]]:
        answers = await asyncio.gather(*(self.ask(session, prompt_tokens) for session in self.sessions))
        return [answer.ids for answer in answers]

    async def ask_one_after_another(self, prompt_tokens: int) -> list[tuple[int, ...]]:
        return [(await self.ask(session, prompt_tokens)).ids for session in self.sessions]

    async def ask(self, session: str, prompt_tokens: int, max_tokens: int = ANSWER_TOKENS) -> Answer:
        request = greedy_ids([10 + int(session)] * prompt_tokens, max_tokens)
        request.routing.session_key = session
        return await generate(self.cluster.stub, request, timeout=PATIENCE_SECONDS)


@pytest_asyncio.fixture(params=[_simulated, _pytorch], ids=["simulated", "pytorch"])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    """All blocks must be back when the last request has ended."""
    build: Callable[[Path], EngineConfig] = request.param
    config = WorkerConfig(
        roles=("prefill", "decode"), engine=build(tmp_path), handoff=HandoffConfig(lease_seconds=5.0), drain_seconds=0
    )
    workers = [config.model_copy(update={"worker_id": name}) for name in ("w1", "w2")]
    async with in_one_task(bench(*workers, router=ROUTER)) as cluster:
        pair = Pair(cluster)
        await pair.find_sessions()
        yield pair
        await eventually(lambda: cluster.used_blocks() == 0)


@pytest.mark.parametrize("prompt_tokens", [100, 200], ids=["half-a-pool", "most-of-a-pool"])
async def test_requests_that_cross_all_end_with_the_ids_of_requests_alone(pair: Pair, prompt_tokens: int) -> None:
    crossed = await pair.ask_all(prompt_tokens)
    assert crossed == await pair.ask_one_after_another(prompt_tokens)


async def test_a_short_request_does_not_wait_for_long_ones_that_cross(pair: Pair) -> None:
    crossing = asyncio.create_task(pair.ask_all(200))
    await eventually(lambda: pair.cluster.used_blocks() > POOL_BLOCKS)
    short = await pair.ask("77", 4, max_tokens=3)
    assert len(short.ids) == 3
    assert not crossing.done()
    assert len(await crossing) == REQUESTS
