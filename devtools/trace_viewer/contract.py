"""The trace contract of docs/tracing.md, version 1, as a check: which spans, links and statuses each outcome leaves."""

from collections.abc import Iterator
from dataclasses import dataclass

from devtools.trace_viewer.reading import ReadSpan, ReadTrace

VERSION = 1

_GENERATE = "baton.generate"
_PREFILL, _DECODE, _ENCODE = "PrefillService/Prefill", "DecodeService/Decode", "EncodeService/Encode"
_SERVED = {"prefill": _PREFILL, "decode": _DECODE, "encode": _ENCODE}
# A handoff that was not confirmed: the same prompt is run again.
_HANDOFF_GONE = ("HANDOFF_LOST", "STALE_EPOCH")
_ROUTER_STAGES = {"admission", "tokenize", "route"}
_CALLING = {"encode", "prefill", "decode"}
_USAGE = ("gen_ai.operation.name", "gen_ai.provider.name", "baton.request_id", "baton.outcome")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of the request, by the contract's names, and the faults of its trace."""

    outcome: str
    faults: tuple[str, ...]


def verify(trace: ReadTrace) -> Verdict:
    """Checks the trace of one Generate."""
    roots = trace.named(_GENERATE)
    if not roots and (refused := _refused_call(trace)):
        return Verdict(f"refused: {refused.outcome}", (*_orphans(trace), *_statuses(trace), *_calls(trace)))
    if len(roots) != 1:
        return Verdict("unknown", (f"{len(roots)} spans {_GENERATE} instead of one", *_orphans(trace)))
    generate = roots[0]
    checks = (_orphans, _statuses, _calls, _links)
    faults = [fault for check in checks for fault in check(trace)]
    faults += [*_generate(trace, generate), *_stages(trace, generate)]
    return Verdict(_outcome(trace, generate), tuple(faults))


def _refused_call(trace: ReadTrace) -> ReadSpan | None:
    """A call that authentication or authorization refused. The client's span may be its parent."""
    calls = [span for span in trace.spans if ".InferenceService/Generate" in span.name and span.is_error]
    if len(calls) != len(trace.spans):
        return None
    served = [span for span in calls if not trace.below(span)]
    return served[0] if len(served) == 1 else None


def _outcome(trace: ReadTrace, generate: ReadSpan) -> str:
    match generate.outcome:
        case "OK":
            return _served_outcome(trace, generate)
        case "CANCELLED":
            who = "client gone" if _is_departure(generate) else "cancelled"
            return f"{who} {'after' if _tokens(generate) else 'before'} first token"
        case "DEADLINE_EXCEEDED":
            return "deadline exceeded"
        case reason:
            return f"{'failed' if trace.named('prefill', 'decode', 'encode') else 'refused'}: {reason}"


def _served_outcome(trace: ReadTrace, generate: ReadSpan) -> str:
    """Which outcome of the contract an answered request had."""
    lost = [span for span in trace.named("prefill", "decode", "encode") if span.is_error]
    if any(span.outcome in _HANDOFF_GONE for span in lost):
        return "ok, handoff lost"
    if any(span.outcome == "DRAINING" for span in lost):
        return "ok, drained"
    for stage in ("decode", "prefill", "encode"):
        if any(span.name == stage for span in lost):
            return f"ok, {stage} lost"
    if generate.attributes.get("baton.topology") == "aggregated":
        return "ok, aggregated"
    return "ok with encode" if trace.named("encode") else "ok"


def _orphans(trace: ReadTrace) -> Iterator[str]:
    """Every span needs a parent in the trace; only the client's call may have one elsewhere."""
    known = {span.span_id for span in trace.spans}
    for span in trace.spans:
        if ".InferenceService/" not in span.name and span.parent_id not in known:
            yield f"{span.name} of {span.service} is an orphan: its parent {span.parent_id or 'is none'} is not here"


def _statuses(trace: ReadTrace) -> Iterator[str]:
    """A failed span has the status ERROR, an error type and an event; a cancelled or refused one has no such status."""
    for span in trace.spans:
        if span.is_error and not (span.attributes.get("error.type") and "exception" in span.events):
            yield f"{span.name} failed without error.type, or without an exception event"
        if span.is_error and span.outcome == "OK":
            yield f"{span.name} failed without baton.outcome"
        if span.is_cancelled and (span.is_error or "cancelled" not in span.events):
            yield f"{span.name} was cancelled: it must have a cancelled event and no error status"
        if "baton.refused" in span.attributes and (span.is_error or "refused" not in span.events):
            yield f"{span.name} was refused what it can do without: it must have a refused event and no error status"
        if not span.is_error and not span.is_cancelled and span.outcome != "OK":
            yield f"{span.name} has the outcome {span.outcome} and no error status"


def _calls(trace: ReadTrace) -> Iterator[str]:
    """Each call has a gRPC status; each successful stage of the router has its call as a child."""
    for span in trace.spans:
        if "rpc.method" in span.attributes and "rpc.response.status_code" not in span.attributes:
            yield f"{span.name} has no rpc.response.status_code"
    for stage, served in _SERVED.items():
        for span in trace.named(stage):
            if span.outcome == "OK" and not trace.below(span, served):
                yield f"{stage} went well and has no {served} below it"


def _links(trace: ReadTrace) -> Iterator[str]:
    """A decode that pulled KV is linked to the span that computed it, on both sides."""
    for served in trace.named(_DECODE):
        stage = trace.find(served.parent_id)
        if not trace.below(served, "handoff"):
            continue
        if not _points_to(trace, served, _PREFILL, _DECODE):
            yield f"{served.name} took a handoff over and has no link to the call that computed it"
        if stage is not None and not _points_to(trace, stage, "prefill", "decode"):
            yield "decode took a handoff over and has no link to the call that it is of"


def _points_to(trace: ReadTrace, span: ReadSpan, *names: str) -> bool:
    targets = {target.span_id for target in trace.named(*names)} - {span.span_id}
    return any(link in targets for link in span.links)


def _generate(trace: ReadTrace, generate: ReadSpan) -> Iterator[str]:
    parent = trace.find(generate.parent_id)
    if parent is None or "rpc.method" not in parent.attributes:
        yield f"{_GENERATE} is not below the client's call"
    elif parent.is_error != generate.is_error:
        yield "the client's call and baton.generate disagree about the end"
    needed = [*_USAGE]
    if generate.outcome == "OK":
        needed += ["gen_ai.response.finish_reasons", "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"]
    if _tokens(generate):
        needed.append("gen_ai.response.time_to_first_chunk")
    for name in needed:
        if name not in generate.attributes:
            yield f"{_GENERATE} lacks {name}"


def _stages(trace: ReadTrace, generate: ReadSpan) -> Iterator[str]:
    """The spans of the stages that this outcome requires."""
    names = {span.name for span in trace.below(generate)}
    needed = {"admission"}
    if generate.outcome == "OK" or _tokens(generate):
        needed |= {"tokenize", "route", "detokenize"}
    if generate.outcome == "OK" and not names & {"prefill", "decode"}:
        yield "a request that was answered was neither prefilled nor decoded"
    refused_at = [span for span in trace.below(generate) if span.name in _ROUTER_STAGES and span.is_error]
    if generate.is_error and not names & _CALLING and not refused_at and generate.outcome != "DEADLINE_EXCEEDED":
        yield "a request was refused, and no stage says so"
    for name in sorted(needed - names):
        yield f"{name} is missing below {_GENERATE}"
    yield from _worker_stages(trace)


def _worker_stages(trace: ReadTrace) -> Iterator[str]:
    for served in trace.named(_PREFILL):
        if served.outcome == "OK":
            yield from _missing(trace, served, "queue", "compute")
    for served in trace.named(_DECODE):
        handoffs = trace.below(served, "handoff")
        if served.outcome == "OK":
            yield from _missing(trace, served, "queue", "decode steps", *([] if handoffs else ["compute"]))
        for handoff in handoffs:
            confirmed = handoff.attributes.get("baton.handoff.confirmed")
            if confirmed is not (handoff.outcome == "OK"):
                yield f"handoff ended with {handoff.outcome} and baton.handoff.confirmed is {confirmed}"
            if confirmed and not {"baton.handoff.blocks", "baton.handoff.bytes"} <= handoff.attributes.keys():
                yield "handoff does not say how much it moved"


def _missing(trace: ReadTrace, span: ReadSpan, *names: str) -> Iterator[str]:
    for name in names:
        if not trace.below(span, name):
            yield f"{name} is missing below {span.name}"


def _tokens(generate: ReadSpan) -> int:
    return int(generate.attributes.get("gen_ai.usage.output_tokens", 0))


def _is_departure(generate: ReadSpan) -> bool:
    """True if the client disconnected, and did not use CancelGeneration."""
    return generate.attributes.get("baton.cancelled_by") == "departure"
