"""A worker's metrics after real calls, over real gRPC, to the simulated engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from support.clients.image_calls import image
from support.clients.scraping import sample, since
from support.clients.worker_calls import TEXT, decode_request
from support.cluster.workers import Running, Starter
from support.eventually import eventually

from baton.errors import RoleMismatch
from baton.inference.v1 import timing_pb2

BLOCKS = 64
BLOCKS_OF_TEXT = 4


@asynccontextmanager
async def watched(running: Running) -> AsyncIterator[None]:
    """Polls the engine's load repeatedly, as `python -m services` does."""
    task = asyncio.create_task(running.worker.watch_engines())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# The ends of calls.


async def test_calls_are_counted_by_stage_and_outcome(prefill: Running, decode: Running) -> None:
    prefills = since("baton_worker_calls_total", stage="prefill", outcome="ok", reason="OK")
    decodes = since("baton_worker_calls_total", stage="decode", outcome="ok", reason="OK")
    await decode.calls.decode(decode_request(await prefill.calls.prefill()))
    assert (prefills.grown, decodes.grown) == (1, 1)


async def test_a_call_that_fails_is_counted_by_its_reason(decode: Running) -> None:
    failed = since("baton_worker_calls_total", stage="prefill", outcome="failed", reason="ROLE_MISMATCH")
    with pytest.raises(RoleMismatch):
        await decode.calls.prefill()
    assert failed.grown == 1


async def test_a_call_whose_caller_leaves_is_cancelled(start: Starter) -> None:
    cancelled = since("baton_worker_calls_total", stage="decode", outcome="cancelled", reason="CANCELLED")
    async with start("decode", decode_step_seconds=0.05) as decode:
        call = decode.calls.decodes.Decode(decode_request(max_tokens=100))
        await call.read()
        call.cancel()
        await eventually(lambda: cancelled.grown == 1)


# The engine.


async def test_the_queue_of_a_prefill_is_what_its_answer_says(start: Starter) -> None:
    queue = since("baton_worker_queue_seconds_sum", stage="prefill")
    compute = since("baton_worker_compute_seconds_sum", stage="prefill")
    async with start("prefill", prefill_base_seconds=0.1, max_batch=1) as prefill:
        await asyncio.gather(*(prefill.calls.prefill(name, text=TEXT + name.encode()) for name in "ab"))
        await prefill.worker.leases.release_all()
    assert 0.1 <= queue.grown < 20
    assert 0.2 <= compute.grown < 20


async def test_the_queue_of_a_decode_is_what_its_answer_says(start: Starter) -> None:
    queue = since("baton_worker_queue_seconds_sum", stage="decode")
    compute = since("baton_worker_compute_seconds_sum", stage="decode")
    async with start("decode", decode_step_seconds=0.02, max_batch=1) as decode:
        requests = (decode_request(request_id=name, max_tokens=6) for name in "ab")
        decoded = await asyncio.gather(*(decode.calls.decode(request) for request in requests))
    queued = [each.timing(timing_pb2.STAGE_DECODE_QUEUE).duration.ToNanoseconds() / 1e9 for each in decoded]
    decoding = [each.timing(timing_pb2.STAGE_DECODE).duration.ToNanoseconds() / 1e9 for each in decoded]
    assert queue.grown == pytest.approx(sum(queued), abs=1e-6)
    assert compute.grown == pytest.approx(sum(decoding), abs=1e-6)
    assert sum(decoding) > 0.1


async def test_tokens_of_a_prompt_count_where_it_is_run(prefill: Running, decode: Running) -> None:
    prompt, generated = since("baton_worker_prompt_tokens_total"), since("baton_worker_generated_tokens_total")
    await decode.calls.decode(decode_request(await prefill.calls.prefill(), max_tokens=9))
    assert (prompt.grown, generated.grown) == (len(TEXT), 9)
    await decode.calls.decode(decode_request(text=b"another prompt", max_tokens=9))
    assert (prompt.grown, generated.grown) == (len(TEXT) + len(b"another prompt"), 18)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_tokens_out_of_the_prefix_cache_are_hits(start: Starter, role: str) -> None:
    async with start("prefill", "decode") as worker:

        async def run(request_id: str) -> None:
            if role == "decode":
                await worker.calls.decode(decode_request(request_id=request_id))
            else:
                await worker.calls.release(await worker.calls.prefill(request_id))

        await run("first")
        hits, prompt = since("baton_prefix_cache_hit_tokens_total"), since("baton_worker_prompt_tokens_total")
        await run("second")
    assert (hits.grown, prompt.grown) == (48, len(TEXT))


async def test_what_the_engine_is_busy_with_is_told(start: Starter) -> None:
    engine = {"decode_step_seconds": 0.05, "max_batch": 1}
    async with start("decode", **engine) as decode, watched(decode):
        calls = [decode.calls.decodes.Decode(decode_request(request_id=name, max_tokens=200)) for name in "abc"]
        await calls[0].read()
        await eventually(lambda: sample("baton_worker_running_requests") == 1)
        await eventually(lambda: sample("baton_worker_waiting_requests") == 2)
        assert sample("baton_worker_waiting_prefill_tokens") == 2 * len(TEXT)
        for call in calls:
            call.cancel()
        await eventually(lambda: sample("baton_worker_running_requests") == 0)


# Blocks and their owners.


async def test_blocks_are_used_held_and_free(start: Starter) -> None:
    async with start("prefill") as prefill, watched(prefill):
        handoff = await prefill.calls.prefill()
        await eventually(lambda: sample("baton_kv_blocks", state="held") == BLOCKS_OF_TEXT)
        blocks = {state: sample("baton_kv_blocks", state=state) for state in ("total", "used", "free")}
        assert blocks == {"total": BLOCKS, "used": BLOCKS_OF_TEXT, "free": BLOCKS - BLOCKS_OF_TEXT}
        assert sample("baton_kv_block_bytes") == 1024
        assert sample("baton_handoffs_held") == 1
        await prefill.calls.release(handoff)
        await eventually(lambda: sample("baton_kv_blocks", state="held") == 0)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_handoff_counts_its_bytes_and_seconds_by_transport(start: Starter, transport: str) -> None:
    moved = since("baton_handoff_bytes_total", transport=transport)
    seconds = since("baton_handoff_seconds_sum", transport=transport)
    waits = since("baton_handoff_wait_seconds_count")
    async with start("prefill", transports=(transport,)) as prefill, start("decode") as decode:
        handoff = await prefill.calls.prefill()
        decoded = await decode.calls.decode(decode_request(handoff))
    told = decoded.timing(timing_pb2.STAGE_HANDOFF_TRANSFER)
    assert moved.grown == told.num_bytes == handoff.num_bytes
    assert seconds.grown == pytest.approx(told.duration.ToNanoseconds() / 1e9, abs=1e-6)
    assert waits.grown == 1


async def test_a_handoff_that_has_nothing_to_move_has_no_transport(prefill: Running, decode: Running) -> None:
    nothing = since("baton_handoff_seconds_count", transport="none")
    text = bytes(range(64))
    for _ in range(2):
        await decode.calls.decode(decode_request(await prefill.calls.prefill(text=text), text=text))
    assert nothing.grown == 1


async def test_a_handoff_that_no_worker_takes_over_is_an_expiry(prefill: Running) -> None:
    expiries = since("baton_handoff_lease_expiries_total")
    await prefill.calls.prefill()
    prefill.let_a_lease_pass()
    await eventually(lambda: expiries.grown == 1)


async def test_a_handoff_that_is_released_is_no_expiry(prefill: Running) -> None:
    expiries = since("baton_handoff_lease_expiries_total")
    await prefill.calls.release(await prefill.calls.prefill())
    assert expiries.grown == 0


async def test_a_decode_that_comes_too_late_is_refused_the_confirmation(start: Starter) -> None:
    refused = since("baton_handoff_confirmations_refused_total")
    async with start("prefill", lease_seconds=0.05) as prefill:
        handoff = await prefill.calls.prefill()
        await eventually(lambda: not len(prefill.worker.leases))
        assert not (await prefill.calls.release(handoff, "reader")).still_valid
    assert refused.grown == 1


# Images, and the process.


async def test_the_rest_of_a_block_without_tokens_is_fragmentation(start: Starter) -> None:
    async with start("decode", decode_step_seconds=0.2) as decode, watched(decode):
        call = decode.calls.decodes.Decode(decode_request(max_tokens=100))
        await call.read()
        # A few tokens in all blocks of the prompt: less than one block of these is empty.
        await eventually(lambda: 0 < sample("baton_kv_fragmentation_ratio") < 1 / BLOCKS_OF_TEXT)
        call.cancel()
        await eventually(lambda: sample("baton_kv_fragmentation_ratio") == 0)


async def test_what_encoding_took_is_told(start: Starter) -> None:
    encoded = since("baton_media_encoded_total", sent="inline")
    seconds = since("baton_worker_compute_seconds_sum", stage="encode")
    async with start("encode", image_tokens=4, encode_seconds=0.05) as encode:
        await encode.calls.encode(image())
    assert encoded.grown == 1
    assert 0.05 <= seconds.grown < 20


async def test_a_worker_that_only_encodes_has_no_kv_blocks(start: Starter) -> None:
    async with start("decode", num_blocks=7) as decode, watched(decode):
        await eventually(lambda: sample("baton_kv_blocks", state="total") == 7)
    async with start("encode", image_tokens=4) as encode, watched(encode):
        await eventually(lambda: sample("baton_embedding_blocks", state="total") > 7)
        assert sample("baton_kv_blocks", state="total") == 7


async def test_a_worker_says_who_it_is_and_what_loading_took(start: Starter) -> None:
    async with start("prefill", "decode", load_seconds=0.2) as worker:
        labels = {"worker_id": worker.worker.worker_id, "roles": "prefill,decode", "model": "simulated"}
        assert sample("baton_worker_info", **labels, engine="simulated") == 1
        assert 0.2 <= sample("baton_model_load_seconds") < 20
