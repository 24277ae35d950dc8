"""The protocol of engines carries one whose KV moves only after the decode side has allocated: docs/extending.md."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.cluster.in_process import Bench, bench
from support.engines.engine_calls import greedy
from support.engines.rooms import Bootstrap, RoomsConfig, RoomsEngine
from support.eventually import eventually

from baton.errors import HandoffLost, InvalidRequest
from services.config import WorkerConfig
from services.engines.kv_transfer import RemoteKv
from services.engines.prompt import Prompt
from services.engines.registry import ENGINES, EngineKind

PROMPT = Prompt(tuple(range(10, 60)))


@pytest.fixture
def bootstrap() -> Bootstrap:
    return Bootstrap()


@pytest_asyncio.fixture
async def pair(bootstrap: Bootstrap, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setitem(ENGINES, "rooms", EngineKind(RoomsConfig, lambda config, context: RoomsEngine(bootstrap)))
    workers = [
        WorkerConfig.model_validate({"worker_id": role, "roles": [role], "engine": RoomsConfig(), "drain_seconds": 0})
        for role in ("prefill", "decode")
    ]
    async with bench(*workers) as running:
        yield running


def _ask(**fields: object) -> dict[str, object]:
    stopping = {"max_tokens": 12, "ignore_eos": True}
    return {"token_ids": {"ids": PROMPT.token_ids}, "stopping": stopping, **fields}


async def test_kv_is_sent_after_the_decode_side_has_allocated(pair: Bench, bootstrap: Bootstrap) -> None:
    apart = await pair.generate(**_ask())
    whole = await pair.generate(**_ask(), routing={"topology": "TOPOLOGY_AGGREGATED"})
    assert apart.placed == ("prefill", "decode")
    assert apart.token_ids == whole.token_ids
    assert bootstrap.log == ["computed", "allocated", "sent"]


async def test_nothing_is_left_after_an_answer(pair: Bench, bootstrap: Bootstrap) -> None:
    await pair.generate(**_ask())
    await eventually(lambda: len(bootstrap) == pair.used_blocks() == 0)


async def test_a_room_without_an_allocation_sends_nothing(bootstrap: Bootstrap) -> None:
    held = await RoomsEngine(bootstrap).prefill(PROMPT, greedy(5))
    assert await held.release() == 4
    assert bootstrap.log == ["computed"]


async def test_an_allocation_for_a_closed_room_is_given_back(bootstrap: Bootstrap) -> None:
    prefill, decode = RoomsEngine(bootstrap), RoomsEngine(bootstrap)
    held = await prefill.prefill(PROMPT, greedy(5))
    await held.release()
    source = RemoteKv(Prompt(PROMPT.token_ids, (held.first_token,)), held.num_tokens, held.engine_state)
    with pytest.raises(HandoffLost):
        await decode.decode_remote(source, greedy(5))
    assert decode.allocated == 0


async def test_a_state_that_is_no_room_is_refused(bootstrap: Bootstrap) -> None:
    with pytest.raises(InvalidRequest):
        await RoomsEngine(bootstrap).decode_remote(RemoteKv(Prompt((5,), (6,)), 1, b"x"), greedy(5))
