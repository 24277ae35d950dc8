"""Workers that keep their memory hand KV over within the host, also after they were killed."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.clients.generation import Answer, generate, greedy_text
from support.cluster.processes import Process, process
from support.cluster.several_processes import until
from support.engines.device import DEVICE, ON_DEVICE
from support.keeping import workers_of

from baton import AsyncClient
from baton.inference.v1 import cluster_service_pb2, timing_pb2
from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from rpc.channels import open_channel

_NEAR = "shm" if DEVICE == "cpu" else "cuda_ipc"
_SETTINGS = ", ".join(f"{key}: {value}" for key, value in ON_DEVICE.items())
_ENGINE = f"{{kind: pytorch, model: models/demo, execution: fused, threads: 1, kv_cache_bytes: 64MiB, {_SETTINGS}}}"
_PROMPTS = [f"Tell me {number} stories: " + "once upon a time " * 9 for number in range(4)]


def _kill(keeper: Process) -> None:
    [child] = workers_of(keeper.popen.pid)
    child.kill()


def _is_back(keeper: Process) -> bool:
    return "worker was started again" in keeper.log.read_text()


async def _all_ready(client: AsyncClient) -> bool:
    return all(worker.state == cluster_service_pb2.WORKER_STATE_READY for worker in await client.workers())


async def _answers(stub: InferenceServiceStub, salt: str) -> Sequence[Answer]:
    """One after the other; the salt has each prompt computed anew."""
    requests = [greedy_text(prompt, 30) for prompt in _PROMPTS]
    for request in requests:
        request.routing.cache_salt = salt
    return [await generate(stub, request) for request in requests]


@pytest.mark.timeout(400)
async def test_kept_pools_are_read_within_the_host_before_and_after_their_owner_was_killed(tmp_path: Path) -> None:
    shared = [f"registry={{kind: file, folder: {tmp_path / 'registry'}}}", "namespace=test", "drain_seconds=0"]
    kept = ["keep_memory={weights: true, kv: true}", f"engine={_ENGINE}", f"transports=[{_NEAR}]"]
    with ExitStack() as stack:
        workers = []
        for role in ("prefill", "decode"):
            own = [*shared, *kept, f"roles=[{role}]", f"worker_id={role}-0"]
            workers.append(stack.enter_context(process("services", "worker.yaml", own, tmp_path / f"{role}.log")))
        patience = [*shared, "retry.wait_seconds=120", "openai.listen=''", "announce_seconds=0"]
        router = stack.enter_context(process("router", "router.yaml", patience, tmp_path / "router.log"))
        for each in (*workers, router):
            each.wait_until_serving()
        async with open_channel(router.address) as channel, AsyncClient(router.address) as client:
            stub = InferenceServiceStub(channel)
            found = [await _answers(stub, "whole")]
            for killed in workers:
                _kill(killed)
                await until(lambda killed=killed: _is_back(killed))  # type: ignore[misc]
                while not await _all_ready(client):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                found.append(await _answers(stub, f"after {killed.log.name}"))
    timings = [timing for answers in found for answer in answers for timing in answer.finished.timings]
    assert {timing.transport for timing in timings if timing.stage == timing_pb2.STAGE_HANDOFF_TRANSFER} == {_NEAR}
    assert len({tuple(answer.ids for answer in answers) for answers in found}) == 1
