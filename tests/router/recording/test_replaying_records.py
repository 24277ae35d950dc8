"""Recorded answers of the embedded engine are run again, and are the same, or the first token that differs is named."""

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.cluster.recorded import Recorded, demo_workers, recorded
from support.engines.checkpoints import save_llama
from support.lifetimes import in_one_task

from baton.inference.v1 import generate_pb2, record_pb2
from cli.commands.records.replay import FirstDifference, Replayed, different_facts, first_differences, replay, report
from cli.commands.records.request import request_of
from router.config import RecordsConfig

_SCHEMA = json.dumps(
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]}
)
_SEEDED = {"temperature": 0.9, "seed": 7}
_LONG = {"max_tokens": 60, "ignore_eos": True}

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": {"temperature": 0.0}},
    "seeded": {"sampling": _SEEDED},
    "drawn_seed": {"sampling": {"temperature": 1.0}},
    "guided": {"sampling": _SEEDED, "guided": {"json_schema": _SCHEMA}, "stopping": {"max_tokens": 80}},
    "three_answers": {"sampling": {**_SEEDED, "n": 3}},
    "three_drawn_answers": {"sampling": {"temperature": 1.0, "n": 3}},
    "stop_string": {"sampling": _SEEDED, "stopping": {**_LONG, "stop": ["e", "st"]}},
    "penalties": {"sampling": {**_SEEDED, "presence_penalty": 1.0, "repetition_penalty": 1.2}},
    "chat": {"prompt": None, "chat": {"messages": [{"role": "user", "parts": [{"text": "Who is Mia?"}]}]}},
}


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Recorded]:
    async with in_one_task(recorded(*demo_workers())) as running:
        yield running


def _request(request_id: str, **fields: Any) -> generate_pb2.GenerateRequest:
    given = {"prompt": "Sort: pear apple mango", "stopping": _LONG, **fields}
    return generate_pb2.GenerateRequest(request_id=request_id, **given)


def _parting(one: Sequence[int], other: Sequence[int]) -> int:
    return next(position for position, ids in enumerate(zip(one, other, strict=False)) if ids[0] != ids[1])


async def _again(cluster: Recorded, record: record_pb2.RequestRecord) -> tuple[Replayed, list[FirstDifference]]:
    replayed = await replay(cluster.clients[1], request_of(record, None))
    return replayed, first_differences(record, replayed.ids)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_recorded_answer_is_the_same_again(cluster: Recorded, kind: str) -> None:
    record = await cluster.run(_request(kind, **KINDS[kind]))
    replayed, differences = await _again(cluster, record)
    assert differences == []
    assert {one.index: list(one.token_ids) for one in record.answers} == replayed.ids
    assert replayed.record.finished.reason == record.finished.reason


@pytest.mark.parametrize("kind", ["greedy", "seeded", "guided", "three_answers", "stop_string"])
async def test_a_moved_answer_is_the_same_again(cluster: Recorded, kind: str) -> None:
    fields = {**KINDS[kind], **({"stopping": {"max_tokens": 300, "ignore_eos": True}} if kind == "seeded" else {})}
    record = await cluster.run_moved(_request(f"moved {kind}", **fields), after=4)
    if kind == "seeded":
        assert record.finished.moves == 1
        assert [one.outcome for one in record.answers[0].attempts] == ["OK", "YIELDED", "OK"]
    assert (await _again(cluster, record))[1] == []


@pytest.mark.parametrize("kind", ["greedy", "seeded", "guided", "three_answers"])
async def test_an_answer_that_another_router_went_on_with_is_the_same_again(cluster: Recorded, kind: str) -> None:
    fields = {**KINDS[kind], **({"stopping": {"max_tokens": 300, "ignore_eos": True}} if kind == "seeded" else {})}
    record = await cluster.run_resumed(_request(f"resumed {kind}", **fields), after=4)
    if kind == "seeded":
        assert record.finished.resumptions or record.answers[0].resumed_tokens
        assert record.router_id != (await cluster.clients[0].records(f"resumed {kind}"))[0].router_id
    assert (await _again(cluster, record))[1] == []


async def test_another_seed_is_named_with_the_first_token_that_differs(cluster: Recorded) -> None:
    record = await cluster.run(_request("seed", sampling=_SEEDED))
    record.request.sampling.seed = 8
    replayed, [difference] = await _again(cluster, record)
    first = _parting(record.answers[0].token_ids, replayed.ids[0])
    assert (difference.first, difference.last) == (first, first)
    assert str(replayed.ids[0][first]) in difference.text
    facts = {fact.name: (fact.recorded, fact.replayed) for fact in different_facts(record, replayed.record, difference)}
    assert facts["the seed"] == ("7", "8")
    assert "  the seed: 7, now 8" in report(record, replayed, [difference])


async def test_other_weights_are_named_even_by_digests_alone(cluster: Recorded, tmp_path: Path) -> None:
    record = await cluster.run(_request("weights", sampling={"temperature": 0.0}))
    ids = list(record.answers[0].token_ids)
    del record.answers[0].token_ids[:]
    async with recorded(*demo_workers(decode=1, model=save_llama(tmp_path)), routers=1) as other:
        replayed = await replay(other.clients[0], request_of(record, None))
    [difference] = first_differences(record, replayed.ids)
    first = _parting(ids, replayed.ids[0])
    assert difference.first <= first <= difference.last < difference.first + 16
    names = {fact.name for fact in different_facts(record, replayed.record, difference)}
    assert "its model and KV layout" in names


async def test_a_redacted_request_is_run_again_with_its_prompt(cluster: Recorded, tmp_path: Path) -> None:
    async with recorded(*demo_workers(decode=1), records=RecordsConfig(asked=True), routers=1) as running:
        request = _request("redacted", sampling=_SEEDED)
        await running.run(request)
        record = await running.record("redacted", 0)
        assert record.redacted == ["prompt"]
        (tmp_path / "prompt").write_text("Sort: pear apple mango\n")
        again = request_of(record, str(tmp_path / "prompt"))
        assert again.prompt == "Sort: pear apple mango"
        replayed = await replay(running.clients[0], again)
        assert first_differences(record, replayed.ids) == []
