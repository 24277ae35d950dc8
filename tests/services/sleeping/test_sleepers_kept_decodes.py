"""Kept decodes of a worker of a group that is killed: their KV is in its memory, which others want meanwhile."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.clients.worker_calls import calls_to, decode_request
from support.cluster.kept_worker import attach, begin, kept_request, kept_worker


@pytest.mark.timeout(200)
async def test_kept_decodes_go_on_in_the_next_process_before_another_model_gets_the_memory(tmp_path: Path) -> None:
    group = f"sleep={{group: {tmp_path}/group, group_bytes: 10, bytes: 6, turn_seconds: 0.1, wait_seconds: 600}}"
    with ExitStack() as stack:
        other, worker = (
            stack.enter_context(kept_worker(tmp_path / name, f"worker_id={name}", "roles=[prefill, decode]", group))
            for name in ("other", "worker")
        )
        async with calls_to(other.process.address) as of_other:
            async with calls_to(worker.process.address) as calls:
                expected = (await calls.decode(kept_request("whole", 500))).token_ids
                await begin(calls, kept_request("left", 500))
                waiting = asyncio.create_task(of_other.decode(decode_request(request_id="waits", max_tokens=20)))
                await worker.kill()
            async with calls_to(worker.process.address) as calls:
                attached, ids, _ = await attach(calls, "left")
            assert [*attached.token_ids, *ids] == expected
            assert (await waiting).finished is not None
