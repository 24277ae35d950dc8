"""The protocol of engines carries one whose decode side allocates before the prompt is computed: docs/extending.md."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.clients.worker_calls import WorkerCalls, calls_to, decode_request, prompt, sampling
from support.clock import ManualClock
from support.cluster.in_process import PATIENT, Bench, bench
from support.cluster.workers import Starter
from support.engines.allocating_rooms import AllocatingRoomsConfig, AllocatingRoomsEngine
from support.engines.engine_calls import greedy
from support.eventually import PATIENCE_SECONDS, eventually

from baton.calls import unary
from baton.engine.v1 import decode_pb2, handoff_pb2, prefill_pb2
from baton.errors import HandoffLost, InvalidRequest, Unsupported
from discovery.memory import MemoryRegistry
from services.config import HandoffConfig, WorkerConfig
from services.engines.prompt import Prompt
from services.engines.registry import ENGINES, EngineKind
from services.server import host_worker

IDS = tuple(range(10, 60))
BLOCKS = 4


class Engines:
    """The engines of the workers, in the order of their start, and what happened in all of them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.all: list[AllocatingRoomsEngine] = []

    def open(self, config: AllocatingRoomsConfig) -> "AllocatingRoomsEngine":
        self.all.append(AllocatingRoomsEngine(config, self.log.append))
        return self.all[-1]

    @property
    def used(self) -> int:
        return sum(engine.allocated + engine.held for engine in self.all)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    opened = Engines()
    kind = EngineKind(AllocatingRoomsConfig, lambda config, context: opened.open(config).serving())
    monkeypatch.setitem(ENGINES, "allocating_rooms", kind)
    return opened


def _worker(worker_id: str, **engine: object) -> WorkerConfig:
    return WorkerConfig(
        worker_id=worker_id,
        roles=(worker_id.rstrip("0123456789"),),  # type: ignore[arg-type]
        engine=AllocatingRoomsConfig(**engine),  # type: ignore[arg-type]
        handoff=HandoffConfig(lease_seconds=6.0),
        drain_seconds=0,
    )


@pytest_asyncio.fixture
async def pair(engines: Engines) -> AsyncIterator[Bench]:
    async with bench(_worker("prefill"), _worker("decode"), router=PATIENT) as running:
        yield running


def _ask(**fields: object) -> dict[str, object]:
    return {"token_ids": {"ids": IDS}, "stopping": {"max_tokens": 12, "ignore_eos": True}, **fields}


async def _expected(running: Bench) -> list[int]:
    return (await running.generate(**_ask(routing={"topology": "TOPOLOGY_AGGREGATED"}))).token_ids


async def test_the_decode_side_allocates_before_the_prompt_is_computed(pair: Bench, engines: Engines) -> None:
    apart = await pair.generate(**_ask())
    assert apart.placed == ("prefill", "decode")
    assert apart.token_ids == await _expected(pair)
    assert engines.log == [f"allocated for {pair.proxies['prefill'].address}", "computing", "sent"]


async def test_nothing_is_left_after_an_answer(pair: Bench, engines: Engines) -> None:
    await pair.generate(**_ask())
    await eventually(lambda: engines.used == 0)


async def test_a_first_token_that_ends_the_answer_frees_what_was_allocated(pair: Bench, engines: Engines) -> None:
    answer = await pair.generate(**_ask(stopping={"max_tokens": 1, "ignore_eos": True}))
    assert len(answer.token_ids) == 1
    await eventually(lambda: engines.used == 0)


async def test_a_client_that_leaves_frees_both_sides(pair: Bench, engines: Engines) -> None:
    engines.all[0].gate.clear()
    asking = asyncio.create_task(pair.generate(**_ask()))
    await eventually(lambda: "computing" in engines.log)
    assert engines.used == 2 * BLOCKS
    asking.cancel()
    await eventually(lambda: engines.used == 0)
    assert engines.log[-1] == "aborted"


async def test_the_lease_is_renewed_while_the_prompt_is_computed(pair: Bench, engines: Engines) -> None:
    engines.all[0].gate.clear()
    asking = asyncio.create_task(pair.generate(**_ask()))
    await eventually(lambda: "computing" in engines.log)
    [lease] = pair.workers["decode"].leases.held
    granted_until = lease.expires_at
    await eventually(lambda: lease.expires_at > granted_until)
    engines.all[0].gate.set()
    assert (await asking).placed == ("prefill", "decode")


async def test_a_prefill_whose_decode_worker_is_lost_is_aborted(engines: Engines) -> None:
    async with bench(_worker("prefill"), _worker("decode"), router=PATIENT) as running:
        expected = await _expected(running)
        engines.all[0].gate.clear()
        asking = asyncio.create_task(running.generate(**_ask()))
        await eventually(lambda: "computing" in engines.log)
        await running.start(_worker("decode2"))
        await running.ready(3)
        await running.proxies["decode"].cut()
        # The gate stays closed: the request has to give up this prefill.
        answer = await asking
        assert answer.token_ids == expected
        assert answer.placed[1] == "decode2"
        assert "aborted" in engines.log
        assert engines.all[0].held == 0
        # On a worker that cannot be reached it ends with its lease.
        await running.workers["decode"].leases.release_all()


async def test_a_lost_prefill_worker_frees_what_was_allocated_for_it(pair: Bench, engines: Engines) -> None:
    expected = await _expected(pair)
    engines.all[0].gate.clear()
    asking = asyncio.create_task(pair.generate(**_ask()))
    await eventually(lambda: "computing" in engines.log)
    await pair.proxies["prefill"].cut()
    answer = await asking
    assert answer.token_ids == expected
    assert answer.finished.migrations == 1
    await eventually(lambda: engines.used == 0)


async def test_a_full_decode_worker_has_the_prompt_run_elsewhere(engines: Engines) -> None:
    async with bench(_worker("prefill"), _worker("decode", num_blocks=BLOCKS - 1), router=PATIENT) as running:
        expected = await _expected(running)
        await running.start(_worker("decode2", num_blocks=BLOCKS - 1))
        await running.ready(3)
        answer = await running.generate(**_ask())
        assert answer.token_ids == expected
        assert "computing" not in engines.log


@pytest_asyncio.fixture
async def alone(engines: Engines) -> AsyncIterator[tuple[WorkerCalls, ManualClock]]:
    """A decode worker, called as a router calls it."""
    clock = ManualClock()
    async with (
        host_worker(_worker("decode"), MemoryRegistry("test"), clock) as worker,
        calls_to(worker.address) as calls,
    ):
        yield calls, clock


async def _allocated(calls: WorkerCalls, request_id: str = "r1") -> handoff_pb2.KvDestination:
    request = decode_pb2.AllocateRequest(request_id=request_id, prompt=prompt(), sampling=sampling())
    return (await unary(calls.decodes.Allocate(request, timeout=PATIENCE_SECONDS))).destination


async def _prefilled(calls: WorkerCalls, destination: handoff_pb2.KvDestination) -> handoff_pb2.KvHandoff:
    request = prefill_pb2.PrefillRequest(request_id="r1", prompt=prompt(), sampling=sampling(), destination=destination)
    return (await unary(calls.prefills.Prefill(request, timeout=PATIENCE_SECONDS))).handoff


async def test_an_allocation_whose_prefill_never_comes_ends_with_its_lease(
    alone: tuple[WorkerCalls, ManualClock], engines: Engines
) -> None:
    calls, clock = alone
    destination = await _allocated(calls)
    assert engines.used > 0
    assert destination.lease.ToSeconds() == 6
    clock.advance(5.9)
    await asyncio.sleep(0)
    assert engines.used > 0
    clock.advance(0.2)
    await eventually(lambda: engines.used == 0)


async def test_an_abort_frees_what_was_allocated(alone: tuple[WorkerCalls, ManualClock], engines: Engines) -> None:
    calls, _ = alone
    await _allocated(calls)
    used = engines.used
    receipt = await calls.abort("r1")
    assert (receipt.blocks_freed, engines.used) == (used, 0)


async def test_a_closed_room_takes_no_kv(alone: tuple[WorkerCalls, ManualClock], engines: Engines) -> None:
    calls, clock = alone
    destination = await _allocated(calls)
    clock.advance(6.1)
    await eventually(lambda: engines.used == 0)
    with pytest.raises(HandoffLost):
        await AllocatingRoomsEngine(AllocatingRoomsConfig()).prefill_into(
            Prompt(IDS), greedy(5), destination.engine_state
        )


@pytest.mark.parametrize("others", [True, False])
async def test_a_decode_gets_only_what_was_allocated_for_it(others: bool, engines: Engines) -> None:
    async with (
        host_worker(_worker("prefill"), MemoryRegistry("test")) as prefill,
        host_worker(_worker("decode"), MemoryRegistry("test")) as decode,
        calls_to(prefill.address) as owner,
        calls_to(decode.address) as reader,
    ):
        destination = await _allocated(reader, "another" if others else "r1")
        handoff = await _prefilled(owner, destination)
        following = decode_request(handoff, "r1")
        following.destination_id = destination.destination_id if others else "unknown"
        with pytest.raises(HandoffLost):
            await reader.decode(following)
        await eventually(lambda: engines.all[0].held == 0)
        await reader.abort("another" if others else "r1")
        assert engines.used == 0


async def test_a_destination_without_a_handoff_is_refused(alone: tuple[WorkerCalls, ManualClock]) -> None:
    request = decode_request(request_id="r1")
    request.destination_id = "x"
    with pytest.raises(InvalidRequest, match="destination_id"):
        await alone[0].decode(request)


async def test_an_engine_that_computes_first_allocates_nothing(start: Starter) -> None:
    async with start("decode") as decode, start("prefill") as prefill:
        with pytest.raises(Unsupported):
            await _allocated(decode.calls)
        with pytest.raises(Unsupported):
            await _prefilled(prefill.calls, handoff_pb2.KvDestination())
