"""The record of a kept answer, which its decode worker has for the routers that may take it over."""

from baton.engine.v1 import decode_pb2, resume_pb2
from baton.inference.v1 import generate_pb2
from discovery.record import KEEPS_STREAMS, WorkerRecord
from router.context import RequestContext
from router.resume.handle import owner_sha256

# A longer record is not kept: workers keep one of each answer.
_LONGEST_RECORD = 16 * 1024


def resumption(ctx: RequestContext, worker: WorkerRecord, seed: int) -> generate_pb2.Resumption | None:
    """The resumption in a kept answer's Started; None if it is not kept: not asked for, or this worker keeps none."""
    keep = ctx.keep
    if keep is None or keep.seconds <= 0 or KEEPS_STREAMS not in worker.capabilities:
        return None
    if _reduced(ctx.request).ByteSize() + len(keep.origin) > _LONGEST_RECORD:
        return None
    given = generate_pb2.Resumption(handle=keep.handle.at(worker.worker_id).text, seed=seed)
    given.keep.FromNanoseconds(int(keep.seconds * 1e9))
    return given


def stream_keep(ctx: RequestContext, started: generate_pb2.Started) -> decode_pb2.StreamKeep:
    """The record that a decode worker keeps of an answer whose `started` has a resumption."""
    keep = ctx.keep
    assert keep is not None
    record = resume_pb2.ResumeRecord(
        request_id=ctx.request_id,
        answer=ctx.answer,
        answers=max(1, ctx.request.sampling.n),
        tenant=ctx.qos.tenant,
        priority=ctx.qos.priority,
        origin=keep.origin,
    )
    record.request.CopyFrom(_reduced(ctx.request))
    record.started.CopyFrom(started)
    record.started.resumption.handle = ""
    ctx.stats.fill_known(record.finished)
    kept = decode_pb2.StreamKeep(
        record=record.SerializeToString(),
        secret_sha256=keep.handle.secret_sha256,
        owner_sha256=owner_of(ctx),
    )
    kept.grace.FromNanoseconds(int(keep.seconds * 1e9))
    return kept


def owner_of(ctx: RequestContext) -> bytes:
    """The digest of the answer's owner."""
    return owner_sha256(ctx.caller.name if ctx.caller else "", ctx.qos.tenant)


def _reduced(request: generate_pb2.GenerateRequest) -> generate_pb2.GenerateRequest:
    """The request without what its decode worker has anyway: only what its text is made with is left."""
    reduced = generate_pb2.GenerateRequest(model=request.model, lora_name=request.lora_name)
    reduced.stopping.CopyFrom(request.stopping)
    reduced.response.CopyFrom(request.response)
    reduced.routing.CopyFrom(request.routing)
    if request.sampling.bad_words:
        # Workers have their ids; that there are some is needed to choose another worker.
        reduced.sampling.bad_words.append(request.sampling.bad_words[0])
    if request.HasField("chat"):
        reduced.chat.tool_choice.CopyFrom(request.chat.tool_choice)
        for tool in request.chat.tools:
            reduced.chat.tools.add(name=tool.name)
    if request.HasField("guided"):
        reduced.guided.SetInParent()
        if request.guided.HasField("structural_tags"):
            reduced.guided.structural_tags.is_required = request.guided.structural_tags.is_required
    return reduced
