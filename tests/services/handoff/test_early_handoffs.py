"""A long prompt is handed over while it is computed: the same answer, and nothing held, whatever happens meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from support.clients.scraping import Since, since
from support.cluster.in_process import PATIENT, Bench, Stream, bench, simulated
from support.cluster.traced import Traced, generated, traced
from support.engines.checkpoints import DEMO
from support.engines.device import DEVICE, ON_DEVICE
from support.engines.gated_prefill import GatedProgress, open_gated
from support.eventually import eventually
from support.transports.nixl import NIXL

from devtools.trace_viewer.contract import Verdict
from router.config import RouterConfig
from services.config import WorkerConfig
from services.engines.pytorch.config import PyTorchConfig
from services.transports.shm import ShmTransport

CHUNK = 64
BLOCK = 16
IDS = tuple(index % 200 for index in range(5 * CHUNK + 7))
BLOCKS = -(-len(IDS) // BLOCK)
# The blocks of all steps but the last.
EARLY_BLOCKS = 5 * CHUNK // BLOCK
ASKED: dict[str, Any] = {
    "token_ids": {"ids": IDS},
    "stopping": {"max_tokens": 12, "ignore_eos": True},
    "sampling": {"seed": 3},
}
PREFETCH, FOLLOW = "baton.engine.v1.DecodeService/Prefetch", "baton.engine.v1.HandoffService/Follow"


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[GatedProgress]:
    return open_gated(monkeypatch)


def _router(tokens: int = CHUNK) -> RouterConfig:
    return PATIENT.model_copy(
        update={"routing": PATIENT.routing.model_copy(update={"early_handoff_tokens": tokens}), "allow_faults": True}
    )


def _worker(worker_id: str, role: str, transport: str = "shm", **engine: object) -> WorkerConfig:
    config = simulated(worker_id, role, prefill_chunk_tokens=CHUNK, allow_faults=True, **engine)
    return config.model_copy(update={"transports": (transport,)})


@pytest_asyncio.fixture
async def pair(engines: list[GatedProgress]) -> AsyncIterator[Bench]:
    async with bench(_worker("p1", "prefill"), _worker("d1", "decode"), router=_router()) as running:
        yield running
        await eventually(lambda: running.used_blocks() == 0)


async def _ask(running: Bench, **fields: object) -> Stream:
    return await running.generate(**{**ASKED, **fields})


async def _expected(running: Bench) -> list[int]:
    return (await _ask(running, routing={"topology": "TOPOLOGY_AGGREGATED", "cache_salt": "whole"})).token_ids


def _early_bytes() -> Since:
    return since("baton_handoff_early_bytes_total")


async def _followed(running: Bench) -> None:
    """Returns once the decode worker reads: it has a lease at the prefill worker, and blocks of its own."""
    await eventually(lambda: len(running.workers["p1"].leases.held) == 1)
    await eventually(lambda: running.workers["d1"].engines.load().blocks_used == BLOCKS)


@pytest.mark.parametrize("transport", ["shm", NIXL, "tcp"])
async def test_the_first_blocks_are_read_while_the_prompt_is_computed(
    transport: str, engines: list[GatedProgress]
) -> None:
    workers = (_worker("p1", "prefill", transport), _worker("d1", "decode", transport))
    async with bench(*workers, router=_router()) as running:
        expected, early = await _expected(running), _early_bytes()
        asked = since("baton_worker_calls_total", stage="prefetch", outcome="ok", reason="OK")
        asking = asyncio.create_task(_ask(running))
        await _followed(running)
        [lease] = running.workers["p1"].leases.held
        await eventually(lambda: len(lease.held.block_ids) == EARLY_BLOCKS)
        engines[0].gate.set()
        answer = await asking
        assert (answer.token_ids, answer.placed) == (expected, ("p1", "d1"))
        await eventually(lambda: asked.grown == 1)
        assert 0 < early.grown <= EARLY_BLOCKS * 4096
        await eventually(lambda: running.used_blocks() == 0)


async def test_the_early_lease_becomes_that_of_the_handoff(pair: Bench, engines: list[GatedProgress]) -> None:
    asking = asyncio.create_task(_ask(pair))
    await _followed(pair)
    [lease] = pair.workers["p1"].leases.held
    engines[0].gate.set()
    await asking
    # Confirmed by the id of the early lease, and by no other.
    assert lease.handoff_id in pair.workers["p1"].leases._released


async def test_blocks_that_decode_has_cached_are_not_read(pair: Bench, engines: list[GatedProgress]) -> None:
    first = await _ask(pair, routing={"topology": "TOPOLOGY_AGGREGATED"})
    early = _early_bytes()
    asking = asyncio.create_task(_ask(pair))
    await eventually(lambda: len(pair.workers["p1"].leases.held) == 1)
    engines[0].gate.set()
    assert (await asking).token_ids == first.token_ids
    assert early.grown == 0


async def test_a_prompt_of_one_step_is_handed_over_after_it(engines: list[GatedProgress]) -> None:
    workers = (_worker("p1", "prefill"), _worker("d1", "decode"))
    async with bench(*workers, router=_router()) as running:
        early = _early_bytes()
        asking = asyncio.create_task(_ask(running, token_ids={"ids": IDS[:CHUNK]}))
        await eventually(lambda: engines[0].telling is not None)
        assert len(running.workers["p1"].leases.held) == 0
        engines[0].gate.set()
        assert len((await asking).token_ids) == 12
        assert early.grown == 0


async def test_short_prompts_are_left_alone(engines: list[GatedProgress]) -> None:
    workers = (_worker("p1", "prefill"), _worker("d1", "decode"))
    async with bench(*workers, router=_router(len(IDS) + 1)) as running:
        asked = since("baton_worker_calls_total", stage="prefetch", outcome="ok", reason="OK")
        engines[0].gate.set()
        await _ask(running)
        assert asked.grown == 0


async def test_a_client_that_leaves_frees_both_sides(pair: Bench) -> None:
    asking = asyncio.create_task(_ask(pair))
    await _followed(pair)
    asking.cancel()
    await eventually(lambda: pair.used_blocks() == 0)
    await eventually(lambda: len(pair.workers["p1"].leases) == 0)


async def test_a_first_token_that_ends_the_answer_frees_what_was_read(
    pair: Bench, engines: list[GatedProgress]
) -> None:
    asking = asyncio.create_task(_ask(pair, stopping={"max_tokens": 1, "ignore_eos": True}))
    await _followed(pair)
    engines[0].gate.set()
    assert len((await asking).token_ids) == 1
    await eventually(lambda: pair.used_blocks() == 0)


async def test_a_prompt_that_loses_its_blocks_is_handed_over_afterwards(
    pair: Bench, engines: list[GatedProgress]
) -> None:
    expected, early = await _expected(pair), _early_bytes()
    asking = asyncio.create_task(_ask(pair))
    await _followed(pair)
    assert engines[0].telling is not None
    # As an engine tells it that preempts the prompt.
    engines[0].telling.lost()
    await eventually(lambda: pair.workers["d1"].engines.load().blocks_used == 0)
    engines[0].gate.set()
    assert (await asking).token_ids == expected
    assert early.grown == 0


async def test_a_lost_prefill_worker_frees_what_was_read_from_it(engines: list[GatedProgress]) -> None:
    async with bench(_worker("p1", "prefill"), _worker("d1", "decode"), router=_router()) as running:
        expected = await _expected(running)
        asking = asyncio.create_task(_ask(running))
        await _followed(running)
        await running.proxies["p1"].cut()
        answer = await asking
        assert answer.token_ids == expected
        assert answer.finished.migrations == 1
        await eventually(lambda: running.used_blocks() == 0)


async def test_another_decode_worker_takes_over_from_one_that_is_lost(engines: list[GatedProgress]) -> None:
    async with bench(_worker("p1", "prefill"), _worker("d1", "decode"), router=_router()) as running:
        expected = await _expected(running)
        asking = asyncio.create_task(_ask(running))
        await _followed(running)
        await running.start(_worker("d2", "decode"))
        await running.ready(3)
        await running.proxies["d1"].cut()
        engines[0].gate.set()
        answer = await asking
        assert (answer.token_ids, answer.placed[1]) == (expected, "d2")
        await eventually(lambda: running.used_blocks() == 0)


async def test_a_transport_that_cannot_read_early_reads_by_the_handoff(
    engines: list[GatedProgress], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShmTransport, "reads_early", False)
    async with bench(_worker("p1", "prefill"), _worker("d1", "decode"), router=_router()) as running:
        expected, early = await _expected(running), _early_bytes()
        engines[0].gate.set()
        answer = await _ask(running)
        assert (answer.token_ids, answer.placed) == (expected, ("p1", "d1"))
        assert early.grown == 0


async def test_a_full_decode_worker_still_takes_the_handoff_later(engines: list[GatedProgress]) -> None:
    small = _worker("d1", "decode")
    small = small.model_copy(update={"engine": small.engine.model_copy(update={"num_blocks": BLOCKS + 8})})
    async with bench(_worker("p1", "prefill"), small, router=_router()) as running:
        engines[0].gate.set()
        both = await asyncio.gather(_ask(running), _ask(running, routing={"cache_salt": "other"}))
        assert [len(answer.token_ids) for answer in both] == [12, 12]
        await eventually(lambda: running.used_blocks() == 0)


@pytest.mark.parametrize("transport", ["shm", "tcp"] if DEVICE == "cpu" else ["cuda_ipc", "tcp"])
async def test_a_real_model_gives_the_same_ids(transport: str, engines: list[GatedProgress]) -> None:
    options = {"model": DEMO, "name": "demo", "threads": 1, "kv_cache_bytes": 64 << 20, "max_step_tokens": CHUNK}
    engine = PyTorchConfig.model_validate({**ON_DEVICE, **options, "max_sequences": 8})
    both = (_worker("p1", "prefill", transport), _worker("d1", "decode", transport))
    workers = [worker.model_copy(update={"engine": engine}) for worker in both]
    # Ids of text.
    asked = {"token_ids": {"ids": [300 + one for one in IDS]}, "sampling": {"temperature": 0}}
    async with bench(*workers, router=_router()) as running:
        early = _early_bytes()
        asking = asyncio.create_task(_ask(running, **asked))
        await eventually(lambda: len(running.workers["p1"].leases.held) == 1)
        engines[0].gate.set()
        answer = await asking
        whole = await _ask(running, **asked, routing={"topology": "TOPOLOGY_AGGREGATED"})
        assert answer.placed == ("p1", "d1")
        assert answer.token_ids == whole.token_ids
        assert early.grown > 0
        await eventually(lambda: running.used_blocks() == 0)


async def test_the_trace_has_what_was_read_early(engines: list[GatedProgress]) -> None:
    workers = (_worker("p1", "prefill"), _worker("d1", "decode"))
    async with traced(*workers, routing=_router().routing) as cluster:
        asking = asyncio.create_task(_ask(cluster.running))
        await _followed(cluster.running)
        engines[0].gate.set()
        await asking
        verdict = await cluster.verdict()
        assert (verdict.outcome, verdict.faults) == ("ok", ())
        [handoff] = cluster.trace().named("handoff")
        assert int(handoff.attributes["baton.handoff.early_bytes"]) > 0
        assert len(cluster.trace().named("prefetch")) == 1


async def test_refusals_are_no_errors_of_the_trace(
    engines: list[GatedProgress], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShmTransport, "reads_early", False)
    async with traced(_worker("p1", "prefill"), _worker("d1", "decode"), routing=_router().routing) as cluster:
        asking = asyncio.create_task(_ask(cluster.running))
        refused = since("baton_worker_calls_total", stage="prefetch", outcome="refused", reason="UNSUPPORTED")
        await eventually(lambda: refused.grown == 1)
        engines[0].gate.set()
        await asking
        assert await cluster.verdict() == Verdict("ok", ())
        assert _refusals(cluster) == {"prefetch": "UNSUPPORTED", PREFETCH: "UNSUPPORTED"}
        assert [span.name for span in cluster.trace().spans if span.is_error] == []


async def test_a_prompt_that_loses_its_blocks_leaves_no_error_in_the_trace(engines: list[GatedProgress]) -> None:
    async with traced(_worker("p1", "prefill"), _worker("d1", "decode"), routing=_router().routing) as cluster:
        asking = asyncio.create_task(_ask(cluster.running))
        await _followed(cluster.running)
        assert engines[0].telling is not None
        engines[0].telling.lost()
        await eventually(lambda: cluster.running.workers["d1"].engines.load().blocks_used == 0)
        engines[0].gate.set()
        await asking
        assert await cluster.verdict() == Verdict("ok", ())
        assert _refusals(cluster) == {"prefetch": "HANDOFF_LOST", PREFETCH: "HANDOFF_LOST", FOLLOW: "HANDOFF_LOST"}
        assert [span.name for span in cluster.trace().spans if span.is_error] == []


async def test_a_fault_of_an_early_handoff_is_an_error_of_the_trace(engines: list[GatedProgress]) -> None:
    async with traced(_worker("p1", "prefill"), _worker("d1", "decode"), routing=_router().routing) as cluster:
        failures = since("baton_worker_calls_total", stage="prefetch", outcome="failed", reason="WORKER_UNAVAILABLE")
        asking = asyncio.create_task(generated(cluster, plan="drop@early", **ASKED))
        await eventually(lambda: failures.grown == 1)
        engines[0].gate.set()
        await asking
        failed = [(span.name, span.outcome) for span in cluster.trace().spans if span.is_error]
        assert sorted(failed) == [(PREFETCH, "WORKER_UNAVAILABLE"), ("prefetch", "WORKER_UNAVAILABLE")]
        assert _refusals(cluster) == {}


def _refusals(cluster: Traced) -> dict[str, str]:
    """The reasons of refused spans, by their names."""
    spans = cluster.trace().spans
    return {span.name: str(refused) for span in spans if (refused := span.attributes.get("baton.refused"))}
