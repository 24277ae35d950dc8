"""Guided answers through a router: prefill, handoff, decode, and decode workers that are lost on the way."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack

import grpc
import pytest
import pytest_asyncio
from support.cluster.in_process import PATIENT, Bench, bench, running_stream, simulated
from support.engines.checkpoints import DEMO
from support.engines.guided import check_json
from support.engines.schemas import FLAG, NUMBER, WORD, Schema, all_schemas, closed, listed
from support.eventually import PATIENCE_SECONDS
from support.lifetimes import in_one_task

from baton.inference.v1 import model_pb2, sampling_pb2
from services.config import HandoffConfig, WorkerConfig
from services.engines.pytorch.config import PyTorchConfig

END = sampling_pb2.FINISH_REASON_END_OF_SEQUENCE
in_shared_loop = pytest.mark.asyncio(loop_scope="module")

TOGETHER = 5
SEVERAL_SECONDS = 120.0
GREEDY: dict[str, object] = {"temperature": 0}
SAMPLED: dict[str, object] = {"temperature": 1.0, "seed": 5}
ORDER = closed(
    customer=WORD,
    items=listed(closed(name=WORD, count=NUMBER, urgent=FLAG), most=3, least=3),
    kind={"enum": ["first", "second"]},
)


def embedded(worker_id: str, *roles: str) -> WorkerConfig:
    return WorkerConfig(
        worker_id=worker_id,
        roles=roles,  # type: ignore[arg-type]
        engine=PyTorchConfig(model=DEMO, name="demo", threads=1, kv_cache_bytes=16 << 20),
        handoff=HandoffConfig(lease_seconds=60.0),
        drain_seconds=0,
    )


def asked(schema: Schema, sampling: Mapping[str, object], **more: object) -> dict[str, object]:
    return {
        "prompt": "Tell me about Mia.",
        "sampling": sampling,
        "stopping": {"max_tokens": 300},
        "guided": {"json_schema": json.dumps(schema)},
        **more,
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Bench]:
    """One prefill and two decode workers of the demo model."""
    configs = embedded("p1", "prefill"), embedded("d1", "decode"), embedded("d2", "decode")
    async with in_one_task(bench(*configs, router=PATIENT)) as running:
        yield running


async def check_lost_worker(cluster: Bench, schema: Schema, sampling: Mapping[str, object], tokens: int) -> int:
    """Loses the decode worker after so many tokens: the answer is the same as without. Returns how often it moved."""
    whole = await cluster.generate(**asked(schema, sampling))
    assert whole.finished.reason == END, whole.text
    check_json(whole.text, schema)
    async with running_stream(cluster, until_tokens=tokens, **asked(schema, sampling)) as task:
        lost = await busy(cluster, task)
        if lost:
            await cluster.proxies[lost].cut()
        again = await asyncio.wait_for(task, PATIENCE_SECONDS)
    if lost:
        await cluster.proxies[lost].restore()
        await cluster.ready(3)
    assert again.token_ids == whole.token_ids
    return again.finished.migrations


async def busy(cluster: Bench, task: "asyncio.Task[object]") -> str:
    """The decode worker that is generating; empty if the answer has ended already."""
    while not task.done():
        for name in ("d1", "d2"):
            if cluster.workers[name].engines.load().running:
                return name
        await asyncio.sleep(0)
    return ""


@pytest.mark.feature("guided decoding", engine="pytorch", facade="grpc")
@in_shared_loop
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_an_answer_stays_inside_its_grammar_when_its_decode_worker_is_lost(
    cluster: Bench, sampling: dict[str, object]
) -> None:
    for _ in range(5):
        migrations = await check_lost_worker(cluster, ORDER, sampling, tokens=10)
        if migrations:  # otherwise the answer had ended before its worker was lost
            break
    assert migrations == 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
@in_shared_loop
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_200_schemas_with_lost_workers(cluster: Bench, sampling: dict[str, object]) -> None:
    """Several schemas at once: every decode worker is lost in turn, with whatever it is generating."""
    schemas = all_schemas()
    moved = 0
    for first in range(0, len(schemas), TOGETHER):
        some = [schema for _, schema in schemas[first : first + TOGETHER]]
        moved += await check_lost_workers(cluster, some, sampling, tokens=2 + first // TOGETHER % 7)
    print(f"{len(schemas)} schemas, twice each: {len(schemas)} valid, {len(schemas)} again, of which {moved} moved")
    # Short answers end before their worker is lost.
    assert moved > 60


async def check_lost_workers(
    cluster: Bench, schemas: Sequence[Schema], sampling: Mapping[str, object], tokens: int
) -> int:
    """Loses a decode worker once most of these answers have so many tokens. Returns how many answers moved."""
    wholes = await asyncio.gather(*(cluster.generate(**asked(schema, sampling)) for schema in schemas))
    for schema, whole in zip(schemas, wholes, strict=True):
        assert whole.finished.reason == END, whole.text
        check_json(whole.text, schema)
    async with AsyncExitStack() as stack:
        streams = (running_stream(cluster, until_tokens=tokens, **asked(schema, sampling)) for schema in schemas)
        tasks = await asyncio.gather(*(stack.enter_async_context(stream) for stream in streams))
        running = {name: cluster.workers[name].engines.load().running for name in ("d1", "d2")}
        lost = max(running, key=lambda name: running[name])
        await cluster.proxies[lost].cut()
        again = await asyncio.wait_for(asyncio.gather(*tasks), SEVERAL_SECONDS)
    await cluster.proxies[lost].restore()
    await cluster.ready(3)
    assert [one.token_ids for one in again] == [whole.token_ids for whole in wholes]
    return sum(one.finished.migrations for one in again)


@in_shared_loop
async def test_several_answers_each_follow_the_grammar(cluster: Bench) -> None:
    stream = await cluster.generate(**asked(closed(a=NUMBER, b=WORD), {**SAMPLED, "n": 3}))
    texts = ["", "", ""]
    for message in stream.messages:
        texts[message.token.index] += message.token.text
    for text in texts:
        check_json(text, closed(a=NUMBER, b=WORD))
    assert len(set(texts)) == 3


@in_shared_loop
async def test_a_stop_string_ends_the_answer_inside_the_grammar(cluster: Bench) -> None:
    stream = await cluster.generate(
        prompt="x", guided={"regex": "(one, two, three, ){5}"}, sampling=GREEDY, stopping={"stop": ["three"]}
    )
    assert (stream.text, stream.finished.reason) == ("one, two, ", sampling_pb2.FINISH_REASON_STOP_STRING)


@in_shared_loop
async def test_the_end_token_is_not_part_of_the_text(cluster: Bench) -> None:
    stream = await cluster.generate(
        prompt="x", guided={"choice": {"texts": ["yes", "no"]}}, sampling=GREEDY, stopping={"ignore_eos": True}
    )
    assert stream.text in ("yes", "no")
    assert (stream.finished.reason, stream.finished.stop_token_id) == (END, stream.token_ids[-1])


@in_shared_loop
async def test_a_schema_that_is_not_supported_is_refused_before_a_worker_is_called(cluster: Bench) -> None:
    schema: Schema = {"type": "object", "properties": {"a": {"not": {}}}}
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await cluster.generate(**asked(schema, GREEDY))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "guided.json_schema.properties.a.not" in str(refused.value.details())
    # The error has no stage and no worker: none was called.
    trailer = dict(refused.value.trailing_metadata() or ())
    assert b"p1" not in bytes(trailer.get("grpc-status-details-bin", b""))


@in_shared_loop
async def test_the_model_says_that_it_has_guided_decoding(cluster: Bench) -> None:
    model = await cluster.stub.GetModel(model_pb2.GetModelRequest(), timeout=PATIENCE_SECONDS)
    assert model.model.capabilities.guided_decoding


async def test_an_engine_without_guided_decoding_says_so() -> None:
    async with bench(simulated("w1", "prefill", "decode")) as running:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await running.generate(prompt="x", guided={"regex": "a"})
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "guided decoding" in str(refused.value.details())
