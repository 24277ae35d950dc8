"""Features that a TensorRT-LLM worker's card excludes: the router refuses them before any worker is called."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from grpc import aio
from support.cluster.in_process import PATIENT, Bench, bench
from support.engines import trtllm
from support.lifetimes import in_one_task

from baton.inference.v1 import generate_pb2, model_pb2
from services.config import HandoffConfig, WorkerConfig


@pytest_asyncio.fixture
async def served(newest: None, checkpoint: Path) -> AsyncIterator[Bench]:
    config = WorkerConfig.model_validate(
        {
            "worker_id": "t1",
            "roles": ["prefill", "decode"],
            "engine": trtllm.settings(checkpoint, name="demo"),
            "handoff": HandoffConfig(lease_seconds=trtllm.TRANSFER_SECONDS / 2),
            "drain_seconds": 0,
        }
    )
    async with in_one_task(bench(config, router=PATIENT)) as running:
        yield running


async def test_a_logit_bias_is_refused_before_any_worker_is_called(served: Bench) -> None:
    ids = generate_pb2.TokenIds(ids=[10, 11])
    with pytest.raises(aio.AioRpcError) as refused:
        await served.generate(token_ids=ids, sampling={"logit_bias": {5: 1.0}}, stopping={"max_tokens": 2})
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert re.search(r"does not support sampling\.logit_bias; it supports", refused.value.details() or "")
    # The router refuses it, and names no worker.
    assert b"t1" not in dict(refused.value.trailing_metadata() or ())["grpc-status-details-bin"]


async def test_bad_words_are_refused_by_name(served: Bench) -> None:
    ids = generate_pb2.TokenIds(ids=[10, 11])
    with pytest.raises(aio.AioRpcError) as refused:
        await served.generate(token_ids=ids, sampling={"bad_words": ["fox"]}, stopping={"max_tokens": 2})
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert re.search(r"does not support sampling\.bad_words; it supports", refused.value.details() or "")


async def test_the_model_says_which_sampling_it_lacks(served: Bench) -> None:
    answer = await served.stub.GetModel(model_pb2.GetModelRequest(name="demo"))
    assert "logit_bias" in answer.model.capabilities.unsupported_sampling


async def test_sampling_that_changes_nothing_is_taken(served: Bench) -> None:
    ids = generate_pb2.TokenIds(ids=[10, 11])
    stream = await served.generate(token_ids=ids, sampling={"top_k": 0, "temperature": 0}, stopping={"max_tokens": 2})
    assert len(stream.token_ids) == 2
