"""Workers that keep their memory hand KV over within the host, also after they were killed."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.clients.generation import Answer, generate, greedy_text
from support.cluster.processes import Process, forked, keeper
from support.engines.device import DEVICE, ON_DEVICE
from support.keeping import workers_of

from baton import AsyncClient
from baton.inference.v1 import cluster_service_pb2, generate_pb2, timing_pb2
from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from rpc.channels import open_channel
from runtime.aio import timeout

_NEAR = "shm" if DEVICE == "cpu" else "cuda_ipc"
_SETTINGS = ", ".join(f"{key}: {value}" for key, value in ON_DEVICE.items())
_ENGINE = f"{{kind: pytorch, model: models/demo, execution: fused, threads: 1, kv_cache_bytes: 64MiB, {_SETTINGS}}}"
_PROMPTS = [f"Tell me {number} stories: " + "once upon a time " * 9 for number in range(4)]


def _kill(keeper: Process) -> None:
    [child] = workers_of(keeper.popen.pid)
    child.kill()


async def _epochs(client: AsyncClient) -> Mapping[str, int]:
    """Of the workers that are ready, as the router knows them: a later process has another one."""
    ready = [each for each in await client.workers() if each.state == cluster_service_pb2.WORKER_STATE_READY]
    return {worker.worker_id: worker.epoch for worker in ready}


async def _until_back(client: AsyncClient, before: Mapping[str, int]) -> None:
    """Waits until the router has another process of one of these workers, and all are ready."""
    async with timeout(60):
        while (now := await _epochs(client)).keys() != before.keys() or now == before:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def _answers(stub: InferenceServiceStub, salt: str) -> Sequence[Answer]:
    """One after the other, each handed over. The salt has each prompt computed anew.

    By itself the router runs prompts as short as these on their decode worker, where computing them is quick.
    """
    requests = [greedy_text(prompt, 30) for prompt in _PROMPTS]
    for request in requests:
        request.routing.cache_salt = salt
        request.routing.topology = generate_pb2.TOPOLOGY_DISAGGREGATED
    return [await generate(stub, request) for request in requests]


def _transports(answer: Answer) -> Sequence[str]:
    """Those by which the KV of its prompt came."""
    pulled = [each for each in answer.finished.timings if each.stage == timing_pb2.STAGE_HANDOFF_TRANSFER]
    return [each.transport for each in pulled]


@pytest.mark.timeout(400)
async def test_kept_pools_are_read_within_the_host_before_and_after_their_owner_was_killed(tmp_path: Path) -> None:
    shared = [f"registry={{kind: file, folder: {tmp_path / 'registry'}}}", "namespace=test", "drain_seconds=0"]
    kept = ["keep_memory={weights: true, kv: true}", f"engine={_ENGINE}", f"transports=[{_NEAR}]"]
    with ExitStack() as stack:
        workers = []
        for role in ("prefill", "decode"):
            own = [*shared, *kept, f"roles=[{role}]", f"worker_id={role}-0"]
            workers.append(stack.enter_context(keeper("worker.yaml", own, tmp_path / f"{role}.log")))
        patience = [*shared, "retry.wait_seconds=120", "openai.listen=''", "announce_seconds=0"]
        router = stack.enter_context(forked("router", "router.yaml", patience, tmp_path / "router.log"))
        for each in (*workers, router):
            each.wait_until_serving()
        async with open_channel(router.address) as channel, AsyncClient(router.address) as client:
            stub = InferenceServiceStub(channel)
            found = [await _answers(stub, "whole")]
            for killed in workers:
                before = await _epochs(client)
                assert len(before) == len(workers)
                _kill(killed)
                await _until_back(client, before)
                found.append(await _answers(stub, f"after {killed.log.name}"))
    assert [_transports(answer) for answers in found for answer in answers] == [[_NEAR]] * 3 * len(_PROMPTS)
    assert len({tuple(answer.ids for answer in answers) for answers in found}) == 1
