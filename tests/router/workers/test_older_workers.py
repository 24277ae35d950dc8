"""Workers of an older version, which do not state what they would ignore: requests that need it go elsewhere."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from grpc import aio
from support.cluster.in_process import DECODE, PREFILL, Bench, bench, eventually, simulated

from baton.error_details import from_rpc_error
from baton.errors import Unsupported
from baton.inference.v1 import cluster_service_pb2, generate_pb2
from discovery.memory import MemoryRegistry
from discovery.record import BAD_WORDS
from services.config import WorkerConfig
from services.server import host_worker

WITH_BAD_WORDS = {"prompt": "hello", "sampling": {"bad_words": ["x"]}, "stopping": {"max_tokens": 3}}
PLAIN = {"prompt": "hello", "stopping": {"max_tokens": 3}}


@asynccontextmanager
async def older(running: Bench, config: WorkerConfig) -> AsyncIterator[None]:
    """A worker whose record does not say that it takes bad words, while the context is open."""
    own = MemoryRegistry("test")
    async with host_worker(config, own) as worker:
        [record] = own.workers()
        assert BAD_WORDS in record.capabilities
        stated = tuple(name for name in record.capabilities if name != BAD_WORDS)
        before = len(running.cluster.workers)
        async with running.registry.register(replace(record, capabilities=stated)):
            await running.ready(before + 1)
            yield
        await eventually(lambda: worker.worker_id not in {one.record.worker_id for one in running.cluster.workers})


async def test_a_request_that_no_worker_would_heed_is_refused_and_its_field_named() -> None:
    async with bench() as running, older(running, DECODE):
        assert len((await running.generate(**PLAIN)).token_ids) == 3
        with pytest.raises(aio.AioRpcError) as caught:
            await running.generate(**WITH_BAD_WORDS)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    error = from_rpc_error(caught.value)
    assert isinstance(error, Unsupported)
    assert "sampling.bad_words" in error.message


async def test_it_goes_to_the_workers_that_heed_it() -> None:
    async with bench(simulated("d2", "decode")) as running, older(running, DECODE):
        assert {(await running.generate(**WITH_BAD_WORDS)).placed for _ in range(4)} == {("", "d2")}
        assert {(await running.generate(**PLAIN)).placed for _ in range(4)} == {("", "d1"), ("", "d2")}


async def test_an_older_prefill_worker_does_not_sample_its_first_token() -> None:
    async with bench(DECODE) as running, older(running, PREFILL):
        assert (await running.generate(**PLAIN)).placed == ("p1", "d1")
        assert (await running.generate(**WITH_BAD_WORDS)).placed == ("", "d1")
        asked = generate_pb2.GenerateRequest(prompt="hello", sampling={"bad_words": ["x"]})
        explained = await running.operators.ExplainRoute(cluster_service_pb2.ExplainRouteRequest(request=asked))
        assert "prefill p1: does not say that it takes bad_words" in explained.workers
