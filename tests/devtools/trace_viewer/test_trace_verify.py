"""`baton trace verify`, and the faults that it finds."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.clients.baton_command import Baton
from support.servers.otlp import Made, resource_spans, trace_id, viewing

from devtools.trace_viewer import reading
from devtools.trace_viewer.contract import Verdict, verify
from devtools.trace_viewer.reading import read
from devtools.trace_viewer.store import TraceStore

CALL = {"rpc.method": "x", "rpc.response.status_code": "OK"}
GENERATED = {
    "gen_ai.operation.name": "text_completion",
    "gen_ai.provider.name": "baton",
    "gen_ai.response.finish_reasons": ["stop"],
    "gen_ai.response.time_to_first_chunk": 0.01,
    "gen_ai.usage.input_tokens": 5,
    "gen_ai.usage.output_tokens": 3,
    "baton.request_id": "r-1",
    "baton.outcome": "OK",
}
MOVED = {"baton.handoff.confirmed": True, "baton.handoff.blocks": 1, "baton.handoff.bytes": 64}

# One trace that is right, by the names of its spans.
RIGHT = {
    "call": Made(1, 1, name="baton.inference.v1.InferenceService/Generate", attributes=CALL),
    "generate": Made(1, 2, 1, name="baton.generate", attributes=GENERATED),
    "admission": Made(1, 3, 2, name="admission"),
    "tokenize": Made(1, 4, 2, name="tokenize"),
    "route": Made(1, 5, 2, name="route"),
    "prefill": Made(1, 6, 2, name="prefill"),
    "Prefill": Made(1, 7, 6, name="baton.engine.v1.PrefillService/Prefill", attributes=CALL),
    "prefill queue": Made(1, 8, 7, name="queue"),
    "prefill compute": Made(1, 9, 7, name="compute"),
    "decode": Made(1, 10, 2, name="decode", links=[(1, 6)]),
    "Decode": Made(1, 11, 10, name="baton.engine.v1.DecodeService/Decode", attributes=CALL, links=[(1, 7)]),
    "handoff": Made(1, 12, 11, name="handoff", attributes=MOVED),
    "decode queue": Made(1, 13, 11, name="queue"),
    "decode steps": Made(1, 14, 11, name="decode steps"),
    "detokenize": Made(1, 15, 2, name="detokenize"),
}


def verdict(spans: Sequence[Made]) -> Verdict:
    store = TraceStore()
    store.add(resource_spans(*spans))
    (trace,) = store.newest_first()
    return verify(read(reading.trace(trace)))


def test_a_trace_that_is_right_has_no_faults() -> None:
    assert verdict(list(RIGHT.values())) == Verdict("ok", ())


@pytest.mark.parametrize("name", sorted(RIGHT.keys() - {"handoff"}))
def test_no_span_may_be_missing(name: str) -> None:
    assert verdict([span for key, span in RIGHT.items() if key != name]).faults


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("decode", {"links": []}, "no link to the call that it is of"),
        ("Decode", {"links": [(1, 6)]}, "no link to the call that computed it"),
        ("route", {"parent": 99}, "orphan"),
        ("Prefill", {"attributes": {"rpc.method": "x"}}, "no rpc.response.status_code"),
        ("prefill", {"error": "gone"}, "without error.type"),
        ("decode steps", {"attributes": {"baton.outcome": "CANCELLED"}}, "cancelled event"),
        ("handoff", {"attributes": {**MOVED, "baton.handoff.confirmed": False}}, "confirmed is False"),
        ("handoff", {"attributes": {"baton.handoff.confirmed": True}}, "how much it moved"),
        ("generate", {"attributes": {**GENERATED, "baton.outcome": "NO_WORKER"}}, "no error status"),
        ("generate", {"attributes": {"baton.outcome": "OK"}}, "lacks gen_ai.usage.output_tokens"),
        ("generate", {"error": "gone"}, "disagree about the end"),
    ],
)
def test_a_fault_is_named(name: str, change: dict[str, object], fault: str) -> None:
    changed = {**RIGHT, name: replace(RIGHT[name], **change)}  # type: ignore[arg-type]
    assert any(fault in found for found in verdict(list(changed.values())).faults)


@pytest.mark.parametrize("has_client", [False, True])
def test_a_call_that_was_refused_at_the_door_is_a_trace_with_or_without_the_clients_span(has_client: bool) -> None:
    failed = {"rpc.method": "x", "rpc.response.status_code": "UNAUTHENTICATED"}
    why = {"error.type": "UNAUTHENTICATED", "baton.outcome": "UNAUTHENTICATED"}
    events = [("exception", {"exception.type": "Unauthenticated"})]
    name = "baton.inference.v1.InferenceService/Generate"
    client = Made(1, 1, name=name, error="unknown", attributes={**failed, **why}, events=events)
    served = Made(1, 2, 1, name=name, error="unknown", attributes={**failed, **why}, events=events)
    spans = [client, served] if has_client else [served]
    assert verdict(spans) == Verdict("refused: UNAUTHENTICATED", ())


def test_a_trace_of_something_else_is_unknown() -> None:
    assert verdict([Made(1, 1, name="other.InferenceService/Get")]).outcome == "unknown"


async def test_the_command_says_the_outcome_and_ends_well(baton: Baton) -> None:
    async with viewing(*RIGHT.values()) as viewer:
        done = await baton("trace", "verify", trace_id(1), "--url", viewer.url)
    assert (done.code, done.out) == (0, "ok: 15 spans, 0 faults by version 1 of the contract\n")


async def test_the_command_lists_faults_and_fails(baton: Baton) -> None:
    async with viewing(*(span for name, span in RIGHT.items() if name != "route")) as viewer:
        done = await baton("trace", "verify", trace_id(1), "--url", viewer.url, "--wait", "0.01")
    assert done.code == 1
    assert done.lines[1:] == ["  route is missing below baton.generate"]


async def test_a_trace_that_is_not_there_is_an_error(baton: Baton) -> None:
    async with viewing() as viewer:
        done = await baton("trace", "verify", trace_id(1), "--url", viewer.url, "--wait", "0.01")
    assert (done.code, "REQUEST_NOT_FOUND" in done.err) == (1, True)
