"""What a router's spans say: the request by OpenTelemetry's conventions for generative AI, and its way by our own."""

from typing import Literal

from baton.engine.v1 import prefill_pb2
from baton.inference.v1 import generate_pb2, sampling_pb2, timing_pb2

from router.account import Account
from router.placement import Demand, Placement, Placer
from router.worker import Worker
from rpc.errors import DeadlineExceeded
from rpc.tracing.span import Attributes, AttributeValue, Span

_Param = Literal["temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "n"]

_PARAMS: dict[_Param, str] = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "n": "gen_ai.request.choice.count",
}

# Our count of a request's time begins a moment after gRPC's.
_TIMER_SECONDS = 0.01

_FINISH_REASONS = {
    sampling_pb2.FINISH_REASON_LENGTH: "length",
    sampling_pb2.FINISH_REASON_END_OF_SEQUENCE: "stop",
    sampling_pb2.FINISH_REASON_STOP_TOKEN: "stop",
    sampling_pb2.FINISH_REASON_STOP_STRING: "stop",
}


def ask(request: generate_pb2.GenerateRequest, span: Span) -> None:
    """What the client asked for. Never its text."""
    if not span.is_recording:
        return
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": "chat" if request.HasField("chat") else "text_completion",
        "gen_ai.provider.name": "baton",
    }
    given = {
        name: getattr(request.sampling, field) for field, name in _PARAMS.items() if request.sampling.HasField(field)
    }
    # Singles on the wire: 0.7 is what the client wrote, and not 0.699999988079071.
    attributes.update({name: round(value, 6) for name, value in given.items()})
    if request.sampling.HasField("seed"):
        # Attributes are signed; a seed may be larger.
        attributes["gen_ai.request.seed"] = request.sampling.seed & (2**63 - 1)
    if request.stopping.HasField("max_tokens"):
        attributes["gen_ai.request.max_tokens"] = request.stopping.max_tokens
    if request.model:
        attributes["gen_ai.request.model"] = request.model
    span.set(attributes)


def left(account: Account, client_seconds: float | None, span: Span) -> None:
    """The call was cancelled; gRPC does that too when the client's time is over, and that is no cancel."""
    if client_seconds is None or account.ledger.total_seconds < client_seconds - _TIMER_SECONDS:
        return
    stage = account.ledger.stage_name
    error = DeadlineExceeded(f"the deadline passed during {stage}", stage=stage)
    account.outcome = error.reason
    span.fail(error)


def describe(account: Account, span: Span) -> None:
    """What became of a request, at its end."""
    if not span.is_recording:
        return
    account.ledger.trace_detokenizing(span)
    facts: dict[str, AttributeValue | None] = {
        "gen_ai.request.model": account.model,
        "gen_ai.response.model": account.model,
        "gen_ai.response.id": account.request_id,
        "gen_ai.usage.input_tokens": account.prompt_tokens,
        "gen_ai.usage.output_tokens": len(account.token_ids),
        "gen_ai.usage.cache_read.input_tokens": account.cached_tokens,
        "gen_ai.response.time_to_first_chunk": account.ledger.first_token_seconds,
        "gen_ai.response.finish_reasons": _finish_reasons(account),
        "baton.request_id": account.request_id,
        "baton.outcome": account.outcome,
        "baton.topology": generate_pb2.Topology.Name(account.topology).removeprefix("TOPOLOGY_").lower(),
        "baton.prefill.worker_id": account.prefill_worker_id,
        "baton.decode.worker_id": account.decode_worker_id,
        "baton.migrations": account.migrations,
    }
    span.set({name: value for name, value in facts.items() if value not in (None, "", [])})


def route(placement: Placement, placer: Placer, demand: Demand, span: Span) -> None:
    """Where it was placed, and what the workers were worth."""
    if not span.is_recording:
        return
    attributes: dict[str, AttributeValue] = {
        "baton.decode.worker_id": placement.decode.record.worker_id,
        "baton.route.scores": placer.explain(demand),
        "baton.topology": generate_pb2.Topology.Name(placement.topology).removeprefix("TOPOLOGY_").lower(),
    }
    if placement.prefill:
        attributes["baton.prefill.worker_id"] = placement.prefill.record.worker_id
    span.set(attributes)


def worker(called: Worker) -> Attributes:
    """Who is called."""
    return {"baton.worker_id": called.record.worker_id, "server.address": called.record.address}


def prefilled(response: prefill_pb2.PrefillResponse) -> Attributes:
    """What a prefill has left: how much it computed, how long that took, what it holds."""
    handoff = response.handoff
    seconds = {each.stage: each.duration.seconds + each.duration.nanos / 1e9 for each in response.timings}
    return {
        "baton.prompt_tokens": handoff.usage.prompt_tokens,
        "baton.cached_tokens": handoff.usage.cached_tokens,
        "baton.prefill.queue_seconds": seconds.get(timing_pb2.STAGE_PREFILL_QUEUE, 0.0),
        "baton.prefill.compute_seconds": seconds.get(timing_pb2.STAGE_PREFILL_COMPUTE, 0.0),
        "baton.handoff.blocks": len(handoff.block_ids),
        "baton.handoff.bytes": handoff.num_bytes,
    }


def _finish_reasons(account: Account) -> list[str]:
    known = _FINISH_REASONS.get(account.finish_reason)
    return [known] if known else []
