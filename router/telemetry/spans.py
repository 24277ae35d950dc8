"""The attributes of a router's spans that are recorded: OpenTelemetry's for generative AI, and the request's result."""

from baton.enum_names import value_name
from baton.inference.v1 import embed_pb2, generate_pb2, image_pb2, sampling_pb2, video_pb2
from baton.sampling_options import OPTIONS, given
from router.telemetry.stats import GENERATE, RequestStats
from rpc.tracing.span import AttributeValue, Span

_FINISH_REASONS = {
    sampling_pb2.FINISH_REASON_LENGTH: "length",
    sampling_pb2.FINISH_REASON_END_OF_SEQUENCE: "stop",
    sampling_pb2.FINISH_REASON_STOP_TOKEN: "stop",
    sampling_pb2.FINISH_REASON_STOP_STRING: "stop",
}


def set_request_attributes(request: generate_pb2.GenerateRequest, span: Span) -> None:
    """Sets the parameters of the request. Its text is never recorded."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": "chat" if request.HasField("chat") else "text_completion",
        "gen_ai.provider.name": "baton",
    }
    for name, value in given(request.sampling).items():
        if OPTIONS[name].row.is_semantic:
            # Singles on the wire: 0.7 is what the client wrote, and not 0.699999988079071.
            attributes[f"gen_ai.request.{name}"] = round(value, 6)
    if request.sampling.HasField("n"):
        attributes["gen_ai.request.choice.count"] = request.sampling.n
    if request.sampling.HasField("seed"):
        # Attributes are signed; a seed may be larger.
        attributes["gen_ai.request.seed"] = request.sampling.seed & (2**63 - 1)
    if request.stopping.HasField("max_tokens"):
        attributes["gen_ai.request.max_tokens"] = request.stopping.max_tokens
    if request.model:
        attributes["gen_ai.request.model"] = request.model
    span.set(attributes)


def set_adopted_attributes(request: generate_pb2.GenerateRequest, span: Span) -> None:
    """Sets what is known of a request that goes on here, after another router or connection."""
    set_request_attributes(request, span)
    span.set({"baton.is_adopted": True})


def set_embed_attributes(request: embed_pb2.EmbedRequest, span: Span) -> None:
    """Sets the parameters of a request for embeddings. Its texts are never recorded."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": "embeddings",
        "gen_ai.provider.name": "baton",
        "baton.embed.inputs": len(request.inputs),
    }
    if request.HasField("dimensions"):
        attributes["gen_ai.embeddings.dimension.count"] = request.dimensions
    span.set(attributes)


def set_drawing_attributes(
    request: image_pb2.ImageServiceGenerateRequest | video_pb2.VideoServiceGenerateRequest, span: Span
) -> None:
    """Sets the parameters of a request for pictures or clips. Its prompts are never recorded."""
    clip = request.video if isinstance(request, video_pb2.VideoServiceGenerateRequest) else None
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": "generate_content",
        "gen_ai.output.type": "image" if clip is None else "video",
        "gen_ai.provider.name": "baton",
    }
    for name in ("width", "height", "steps", "number", "guidance_scale"):
        if request.options.HasField(name):
            attributes[f"baton.image.{name}"] = getattr(request.options, name)
    if clip is not None and clip.HasField("frames"):
        attributes["baton.video.frames"] = clip.frames
    span.set(attributes)


def set_result_attributes(stats: RequestStats, span: Span) -> None:
    """Sets the result of the request, at its end."""
    stats.timings.trace_detokenizing(span)
    facts: dict[str, AttributeValue | None] = {
        "gen_ai.request.model": stats.model,
        "gen_ai.response.model": stats.model,
        "gen_ai.response.id": stats.request_id,
        "gen_ai.usage.input_tokens": stats.prompt_tokens,
        "gen_ai.usage.output_tokens": stats.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": stats.cached_tokens,
        "gen_ai.response.time_to_first_chunk": stats.timings.first_token_seconds,
        "gen_ai.response.finish_reasons": _finish_reasons(stats),
        "baton.request_id": stats.request_id,
        "baton.outcome": stats.outcome,
        "baton.topology": _topology(stats),
        "baton.prefill.worker_id": stats.prefill_worker_id,
        "baton.decode.worker_id": stats.decode_worker_id,
        "baton.migrations": stats.migrations,
        "baton.moves": stats.moves or None,
    }
    span.set({name: value for name, value in facts.items() if value not in (None, "", [])})


def _topology(stats: RequestStats) -> str:
    if stats.operation != GENERATE:
        return ""
    return value_name(generate_pb2.Topology, stats.topology)


def _finish_reasons(stats: RequestStats) -> list[str]:
    known = _FINISH_REASONS.get(stats.finish_reason)
    return [known] if known else []
