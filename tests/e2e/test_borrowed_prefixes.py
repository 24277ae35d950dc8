"""Prefixes that workers borrow, on the demonstration model: planned, explained, counted, and the same ids."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.clients.baton_command import Baton
from support.clients.generation import generate
from support.clients.worker_calls import calls_to, decode_request
from support.cluster.command_fixtures import baton, environment
from support.cluster.demo import demo_worker
from support.cluster.in_process import PATIENT, Bench, Stream, bench, simulated
from support.cluster.traced import generated, traced
from support.engines.adapters import merged, save_adapter
from support.engines.checkpoints import DEMO, PlainModel
from support.eventually import PATIENCE_SECONDS, eventually
from support.images.demo_questions import as_prompt, questions

from baton.inference.v1 import cluster_service_pb2, generate_pb2, sampling_pb2
from engine_protocol.timing_profile import DecodePoint, PrefillPoint, TimingProfile
from router.config import RouterConfig, RoutingConfig
from runtime.aio import timeout
from services.config import HandoffConfig, WorkerConfig

__all__ = ["baton", "environment"]

GREEDY = sampling_pb2.SamplingParams(temperature=0)
TOKENS, BLOCK_TOKENS = 8, 16
PROFILE: list[Path] = []
ALONE, DISAGGREGATED = generate_pb2.TOPOLOGY_AGGREGATED, generate_pb2.TOPOLOGY_DISAGGREGATED


def prompt(seed: int, length: int = 1200) -> list[int]:
    return random.Random(seed).choices(range(8, 250), k=length)


def fields(ids: Sequence[int], topology: generate_pb2.Topology.ValueType, **others: object) -> dict[str, object]:
    routing = generate_pb2.RoutingOptions(topology=topology, cache_salt=str(others.pop("salt", "")))
    return {
        "model": "demo",
        "token_ids": generate_pb2.TokenIds(ids=ids),
        "sampling": GREEDY,
        "stopping": sampling_pb2.StoppingOptions(max_tokens=TOKENS),
        "routing": routing,
        **others,
    }


@pytest.fixture(scope="module", autouse=True)
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Routers take the model for a slow one, so that a loan has seconds of patience on a busy machine."""
    profile = TimingProfile("demo", (PrefillPoint(1, 0.0025), PrefillPoint(4096, 10.24)), (DecodePoint(1, 64, 0.01),))
    PROFILE.append(tmp_path_factory.mktemp("profile") / "slow.json")
    PROFILE[0].write_text(profile.to_json())
    yield
    PROFILE.clear()


def router(*, prefix_loans: bool = True) -> RouterConfig:
    routing = RoutingConfig(policy="predicted_seconds", prefix_loans=prefix_loans, profile=str(PROFILE[0]))
    return PATIENT.model_copy(update={"routing": routing})


@asynccontextmanager
async def cluster(*configs: WorkerConfig, prefix_loans: bool = True) -> AsyncIterator[Bench]:
    workers = configs or (demo_worker("prefill"), demo_worker("decode"))
    async with bench(*workers, router=router(prefix_loans=prefix_loans), proxied=False) as running:
        yield running
        await eventually(lambda: running.used_blocks() == 0)
        assert not any(len(worker.leases) for worker in running.workers.values())


async def candidate(running: Bench, ids: Sequence[int]) -> cluster_service_pb2.RouteCandidate:
    """The prediction for the pair of workers."""
    request = generate_pb2.GenerateRequest(**fields(ids, DISAGGREGATED))  # type: ignore[arg-type]
    asked = cluster_service_pb2.ExplainRouteRequest(request=request)
    [found] = (await running.operators.ExplainRoute(asked)).candidates
    return found


async def borrowed(running: Bench, ids: Sequence[int], **others: object) -> Stream:
    """An answer whose prompt the decode worker has cached, and the prefill worker is to compute."""
    async with timeout(PATIENCE_SECONDS):
        while not (await candidate(running, ids)).peer_tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return await running.generate(**fields(ids, DISAGGREGATED, **others))


@pytest.mark.feature("prefixes of prompts from other workers", engine="pytorch", facade="grpc")
@pytest.mark.parametrize("seed", [None, 11])
async def test_ids_are_the_same_with_and_without_a_loan(seed: int | None) -> None:
    drawing = GREEDY if seed is None else sampling_pb2.SamplingParams(seed=seed, temperature=1.0)
    ids = prompt(1)
    async with cluster(prefix_loans=False) as running:
        without = await running.generate(**fields(ids, DISAGGREGATED, sampling=drawing))
        assert without.finished.usage.peer_cached_tokens == 0
    async with cluster() as running:
        alone = await running.generate(**fields(ids, ALONE, sampling=drawing))
        loaned = await borrowed(running, ids, sampling=drawing)
    full = (len(ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert loaned.finished.usage.peer_cached_tokens == loaned.finished.usage.cached_tokens == full
    assert loaned.token_ids == without.token_ids == alone.token_ids


async def test_a_loan_is_explained(baton: Baton) -> None:
    ids = prompt(2)
    async with cluster() as running:
        await running.generate(**fields(ids, ALONE))
        async with timeout(PATIENCE_SECONDS):
            while not (found := await candidate(running, ids)).peer_tokens:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (found.peer_worker_id, found.peer_tokens, found.cached_tokens) == ("decode-0", 1184, 1184)
        shown = await baton("explain", "any words", "--address", running.address)
    assert shown.code == 0
    assert "peer" in "".join(shown.lines[:3]).split()


async def test_a_loan_is_a_span_of_its_request() -> None:
    text = bytes(random.Random(9).choices(range(8, 250), k=1200))
    workers = simulated("p1", "prefill"), simulated("d1", "decode")
    async with traced(*workers, routing=router().routing) as cluster:
        running = cluster.running
        async with calls_to(running.workers["d1"].address) as calls:
            await calls.decode(decode_request(text=text))
        async with timeout(PATIENCE_SECONDS):
            while not (await candidate(running, list(text))).peer_tokens:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        verdict = await generated(cluster, **fields(list(text), DISAGGREGATED))
        assert not verdict.faults
        [loan] = cluster.trace().named("prefix loan")
        [route] = cluster.trace().named("route")
    assert (loan.attributes["baton.prefix_loan.outcome"], loan.attributes["baton.prefix_loan.tokens"]) == (
        "borrowed",
        1184,
    )
    assert loan.attributes["baton.worker_id"] == route.attributes["baton.route.peer_worker_id"] == "d1"


async def test_loans_are_off_unless_they_are_configured() -> None:
    ids = prompt(3)
    async with cluster(prefix_loans=False) as running:
        await running.generate(**fields(ids, ALONE))
        again = await running.generate(**fields(ids, DISAGGREGATED))
        assert (await candidate(running, ids)).peer_tokens == 0
        assert again.finished.usage.peer_cached_tokens == 0


async def test_no_prefix_crosses_a_salt() -> None:
    ids = prompt(4)
    async with cluster() as running:
        mine = await running.generate(**fields(ids, ALONE, salt="one tenant"))
        other = await running.generate(**fields(ids, DISAGGREGATED, salt="another"))
        assert other.token_ids == mine.token_ids
        assert (other.finished.usage.cached_tokens, other.finished.usage.peer_cached_tokens) == (0, 0)


async def test_no_prefix_crosses_an_adapter(tmp_path: Path) -> None:
    save_adapter(tmp_path / "first", DEMO, seed=1)
    plain = {"": PlainModel(DEMO), "first": merged(DEMO, tmp_path / "first")}
    ids = prompt(5, 400)

    def with_adapters(role: str) -> WorkerConfig:
        config = demo_worker(role)
        lora = {"folder": tmp_path, "max_loaded": 2}
        engine = config.engine.model_validate({**config.engine.model_dump(), "lora": lora})
        return config.model_copy(update={"engine": engine})

    async with cluster(with_adapters("prefill"), with_adapters("decode")) as running:
        await eventually(lambda: all(one.loras.is_reported for one in running.cluster.workers))
        await running.generate(**fields(ids, ALONE))
        adapted = await running.generate(**fields(ids, DISAGGREGATED, lora_name="first"))
        assert adapted.finished.usage.cached_tokens == 0
        assert tuple(adapted.token_ids) == plain["first"].generate(tuple(ids), TOKENS)
        base = await borrowed(running, ids)
        assert base.finished.usage.peer_cached_tokens > 0
        assert tuple(base.token_ids) == plain[""].generate(tuple(ids), TOKENS)


async def test_the_beginning_of_a_prompt_with_pictures_is_lent() -> None:
    """Its chain has the digests of the pictures: another one has other names."""
    chosen = max(questions(12, "loans"), key=lambda each: len(each.pictures))
    asked = as_prompt(chosen)
    asked.prompt = "A list of words that say nothing about it, " * 12 + asked.prompt
    async with cluster(*map(demo_worker, ("encode", "prefill", "decode"))) as running:
        answers = []
        for topology in (ALONE, DISAGGREGATED):
            asked.routing.topology = topology
            answers.append(await generate(running.stub, asked))
            await eventually(lambda: running.used_blocks() == 0)
    alone, loaned = answers
    assert loaned.ids == alone.ids
    usage = loaned.finished.usage
    assert usage.media_tokens > 0
    assert usage.peer_cached_tokens == usage.cached_tokens == (usage.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


async def test_a_lender_that_has_gone_is_not_waited_for() -> None:
    ids = prompt(6)
    spare = demo_worker("decode").model_copy(update={"worker_id": "decode-1"})
    async with cluster(demo_worker("prefill"), demo_worker("decode"), spare) as running:
        alone = await running.generate(**fields(ids, ALONE))
        await running.stop(alone.finished.decode_worker_id)
        again = await running.generate(**fields(ids, DISAGGREGATED))
        assert again.token_ids == alone.token_ids


@pytest.mark.parametrize("verify", ["sample", "always"])
async def test_handoffs_that_are_checked_give_the_same_ids(verify: str) -> None:
    checking = demo_worker("decode").model_copy(
        update={"handoff": HandoffConfig(verify=verify, verify_every=2)}  # type: ignore[arg-type]
    )
    prompts = [prompt(seed, 100) for seed in range(4)]
    async with cluster(demo_worker("prefill"), checking) as running:
        found = [await running.generate(**fields(ids, DISAGGREGATED)) for ids in prompts]
    plain = PlainModel(DEMO)
    assert [tuple(each.token_ids) for each in found] == [plain.generate(tuple(ids), TOKENS) for ids in prompts]
