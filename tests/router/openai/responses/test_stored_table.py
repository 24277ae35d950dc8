"""The table of kept responses: ids that clients choose, conversations, and bounds."""

import asyncio
import json
from pathlib import Path

import pytest
from support.clock import ManualClock
from support.stored_responses import ANN, BOB, end, entry_of, table_of

from baton.errors import InvalidRequest, Overloaded, QuotaExceeded
from baton.inference.v1 import generate_pb2
from router.openai.resumable.responses import numbered
from router.openai.stored.service import put_before


async def test_an_id_that_is_kept_again_counts_once() -> None:
    table = table_of()
    for _ in range(3):
        again = await entry_of("resp_1")
        table.add(again)
    assert (len(table), table.num_bytes) == (1, again.size)
    table.drop(again)
    assert table.num_bytes == 0


async def test_an_id_of_another_owner_is_not_taken() -> None:
    table = table_of()
    table.add(own := await entry_of("resp_1"))
    with pytest.raises(InvalidRequest):
        table.add(await entry_of("resp_1", BOB))
    assert table.get("resp_1", ANN) is own


async def test_a_response_that_goes_on_from_itself_ends_no_search() -> None:
    table = table_of()
    table.add(await entry_of("resp_1", previous_response_id="resp_1"))
    with pytest.raises(InvalidRequest, match="goes on from more than"):
        await asyncio.wait_for(asyncio.to_thread(table.chain, "resp_1", ANN), 50.0)


async def test_what_a_response_tells_of_its_request_counts() -> None:
    entry = await entry_of("resp_1", instructions="x" * 10_000, metadata={"a": "y" * 10_000})
    assert entry.measure() > 20_000


async def test_running_responses_take_no_more_than_their_bytes() -> None:
    table = table_of(tenant_bytes=50_000, max_bytes=70_000)
    large = {"ends": False, "instructions": "x" * 20_000}
    for number in range(2):
        table.add(await entry_of(f"resp_{number}", **large))
    with pytest.raises(QuotaExceeded):
        table.add(await entry_of("resp_2", **large))
    table.add(await entry_of("resp_3", BOB, **large))
    with pytest.raises(Overloaded):  # of all
        table.add(await entry_of("resp_4", BOB, **large))


async def test_a_response_stays_from_its_end_on() -> None:
    clock = ManualClock()
    table = table_of(clock, seconds=10)
    table.add(entry := await entry_of("resp_1", ends=False))
    clock.advance(60)
    await end(entry)
    table.update(entry)
    assert table.get("resp_1", ANN) is entry


async def test_what_comes_after_a_cancellation_changes_nothing() -> None:
    entry = await entry_of("resp_1", ends=False)
    entry.document.cancel()
    before = list(entry.document.events(-1))
    await end(entry)
    assert (entry.document.status, list(entry.document.events(-1))) == ("cancelled", before)


def test_a_stored_turn_keeps_nothing_else_of_its_request() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before, kept = resident(), []
    for _ in range(20):
        request = generate_pb2.GenerateRequest()
        request.chat.messages.add(role="system").parts.add(text="x" * 4_000_000)
        request.chat.messages.add(role="user").parts.add(text="hello")
        kept.append(put_before(request, (), list(request.chat.messages)[1:]))
        del request
    assert resident() - before < 40_000_000


async def test_a_tenant_leaves_running_places_to_others() -> None:
    table = table_of(max_running=3, tenant_running=2)
    for number in range(2):
        table.add(await entry_of(f"resp_{number}", ends=False))
    with pytest.raises(QuotaExceeded) as refused:
        table.add(await entry_of("resp_2", ends=False))
    assert (refused.value.subject, refused.value.retry_after_seconds) == ("ann", 1.0)
    table.add(await entry_of("resp_3", BOB, ends=False))
    with pytest.raises(Overloaded):
        table.add(await entry_of("resp_4", b"cy", ends=False))
    await end(table.get("resp_0", ANN))
    table.update(table.get("resp_0", ANN))
    table.add(await entry_of("resp_5", ANN, ends=False))


async def test_what_a_response_tells_of_its_request_is_made_once() -> None:
    text = 'an "instruction" with "shown": null in it, é and 日'
    entry = await entry_of("resp_1", instructions=text, metadata={"shown": "a"})
    found = json.loads(entry.document.response())
    assert (found["instructions"], found["metadata"], found["tools"]) == (text, {"shown": "a"}, [])
    assert found["text"] == {"format": {"type": "text"}}
    assert "shown" not in found
    events = [json.loads(numbered(one).partition(b"data: ")[2]) for one in entry.document.events(-1)]
    responses = [one["response"] for one in events if "response" in one]
    assert [one["instructions"] for one in responses] == [text] * 3
    assert not any("shown" in one for one in responses)
