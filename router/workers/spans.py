"""The attributes of spans that name workers: the route, and the result of a prefill."""

from baton.engine.v1 import prefill_pb2
from baton.enum_names import value_name
from baton.inference.v1 import generate_pb2, timing_pb2
from router.routing.policy import Placement
from router.workers.handle import WorkerHandle
from rpc.tracing.span import Attributes, AttributeValue, Span


def set_routing_attributes(placement: Placement[WorkerHandle], span: Span) -> None:
    """Sets the chosen workers, and why the policy chose them."""
    if not span.is_recording:
        return
    attributes: dict[str, AttributeValue] = {
        "baton.decode.worker_id": placement.decode.record.worker_id,
        "baton.route.scores": placement.explain(),
        "baton.topology": value_name(generate_pb2.Topology, placement.topology),
    }
    if placement.prefill:
        attributes["baton.prefill.worker_id"] = placement.prefill.record.worker_id
    if placement.prediction:
        attributes["baton.route.predicted_seconds"] = placement.prediction.total
        attributes["baton.route.predicted_first_token_seconds"] = placement.prediction.first_token
        attributes["baton.route.cached_tokens"] = placement.prediction.cached_tokens
        if peer := placement.prediction.load.peer:
            attributes["baton.route.peer_worker_id"] = peer.record.worker_id
            attributes["baton.route.peer_tokens"] = peer.tokens
    span.set(attributes)


def worker_attributes(worker: WorkerHandle) -> Attributes:
    """The worker that a call goes to."""
    return {"baton.worker_id": worker.record.worker_id, "server.address": worker.record.address}


def prefill_attributes(response: prefill_pb2.PrefillResponse) -> Attributes:
    """The result of a prefill: tokens, times, and the KV blocks that it holds."""
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
