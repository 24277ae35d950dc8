"""Between messages and values. Whatever comes off the wire is checked here, and named by its field if it is wrong."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from baton.engine.v1 import decode_pb2, handoff_pb2, prefill_pb2, prompt_pb2, worker_pb2
from baton.inference.v1 import cluster_service_pb2, media_pb2, model_pb2, sampling_pb2, timing_pb2
from google.protobuf.duration_pb2 import Duration

from rpc.errors import FieldViolation, InvalidRequest, Unsupported
from services.aborting import Aborted
from services.answer import Finished, FinishReason, TokenLogprob, Tokens
from services.decoding import Accepted
from services.draining import Progress
from services.engine import EngineLoad, ImageRules, ModelFacts
from services.handoffs import Handoff, Timing
from services.kv import HeldKv, KvLayout
from services.kv_elsewhere import MovingKv
from services.kv_events import KvChange, KvRemoved, KvSnapshot, KvStored
from services.leases import Lease
from services.owner import OfferedPool, Owner
from services.prefilling import Prefilled
from services.prompt import Prompt, Sampling

_REASONS = {
    FinishReason.END_OF_SEQUENCE: sampling_pb2.FINISH_REASON_END_OF_SEQUENCE,
    FinishReason.STOP_TOKEN: sampling_pb2.FINISH_REASON_STOP_TOKEN,
    FinishReason.LENGTH: sampling_pb2.FINISH_REASON_LENGTH,
}

_Ranged = Literal["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]

# What each parameter may be. None of them is NaN: every comparison with it is false.
_RANGES: dict[_Ranged, Callable[[float], bool]] = {
    "temperature": lambda value: 0 <= value < math.inf,
    "top_p": lambda value: 0 < value <= 1,
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: 0 < value < math.inf,
    "presence_penalty": lambda value: -2 <= value <= 2,
    "frequency_penalty": lambda value: -2 <= value <= 2,
}
_NEEDED = ("handoff_id", "address")
_PASSED_ON: tuple[_Ranged | Literal["top_k", "seed"], ...] = (*_RANGES, "top_k", "seed")


def prompt(request: prefill_pb2.PrefillRequest | decode_pb2.DecodeRequest) -> Prompt:
    """The ids to continue. Raises InvalidRequest if there are none."""
    message = request.prompt
    if not message.token_ids:
        raise InvalidRequest.of("prompt.token_ids", "is empty")
    return Prompt(
        token_ids=tuple(message.token_ids),
        emitted=tuple(request.emitted) if isinstance(request, decode_pb2.DecodeRequest) else (),
        cache_salt=message.cache_salt,
        data_parallel_rank=request.data_parallel_rank if request.HasField("data_parallel_rank") else None,
    )


def sampling(message: prompt_pb2.Sampling) -> Sampling:
    """How to sample; what is unset gets Sampling's defaults. Raises InvalidRequest naming every wrong field."""
    params, stop = message.params, message.stop
    violations = [*_wrong_params(params), *_wrong_stop(stop)]
    if violations:
        raise InvalidRequest(violations)
    if params.HasField("n") and params.n != 1:
        raise Unsupported("sampling.params.n: a worker gives one answer; it can do n = 1")
    return Sampling(
        max_tokens=stop.max_tokens,
        min_tokens=stop.min_tokens,
        stop_token_ids=frozenset(stop.stop_token_ids),
        ignore_eos=stop.ignore_eos,
        logit_bias=dict(params.logit_bias),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        **{name: getattr(params, name) for name in _PASSED_ON if params.HasField(name)},
    )


def _wrong_params(params: sampling_pb2.SamplingParams) -> list[FieldViolation]:
    given = {name: getattr(params, name) for name in _RANGES if params.HasField(name)}
    violations = [
        FieldViolation(f"sampling.params.{name}", f"{value} is out of range")
        for name, value in given.items()
        if not _RANGES[name](value)
    ]
    for token_id, bias in params.logit_bias.items():
        if not -100 <= bias <= 100:
            violations.append(
                FieldViolation(f"sampling.params.logit_bias[{token_id}]", f"{bias} is not within -100 and 100")
            )
    return violations


def _wrong_stop(stop: prompt_pb2.StopConditions) -> list[FieldViolation]:
    violations = []
    if not stop.max_tokens:
        violations.append(FieldViolation("sampling.stop.max_tokens", "is 0 or unset; at least 1 is needed"))
    if stop.min_tokens > stop.max_tokens:
        violations.append(FieldViolation("sampling.stop.min_tokens", f"is over max_tokens, {stop.max_tokens}"))
    return violations


def handoff(message: handoff_pb2.KvHandoff) -> Handoff:
    """A handoff as its reader sees it. Its numbers are checked against the pools before they are used.

    Raises InvalidRequest if it does not say what is held, or where.
    """
    violations = [FieldViolation(f"handoff.{name}", "is empty") for name in _NEEDED if not getattr(message, name)]
    if violations:
        raise InvalidRequest(violations)
    return Handoff(
        handoff_id=message.handoff_id,
        worker_id=message.worker_id,
        epoch=message.epoch,
        address=message.address,
        lease_seconds=as_seconds(message.lease),
        layout_digest=message.layout_digest,
        num_tokens=message.num_tokens,
        num_bytes=message.num_bytes,
        block_ids=tuple(message.block_ids),
        first_token=message.first_token.token_id,
        engine_state=message.engine_state,
    )


def prefill_response(owner: Owner, prefilled: Prefilled) -> prefill_pb2.PrefillResponse:
    """The answer that hands over, or, of a request that has ended already, its only token."""
    kv = prefilled.kv
    handed_over = _handoff(owner, prefilled)
    handed_over.first_token.CopyFrom(_first_token(kv))
    handed_over.usage.prompt_tokens = prefilled.prompt_tokens
    handed_over.usage.cached_tokens = kv.cached_tokens
    timings = stage_timings(prefilled.timings, owner.identity.worker_id)
    return prefill_pb2.PrefillResponse(handoff=handed_over, timings=timings)


def _handoff(owner: Owner, prefilled: Prefilled) -> handoff_pb2.KvHandoff:
    message = handoff_pb2.KvHandoff(
        worker_id=owner.identity.worker_id,
        epoch=owner.identity.epoch,
        address=owner.identity.address,
        layout_digest=owner.layout.digest,
    )
    if prefilled.lease:
        kv = prefilled.kv
        message.handoff_id = prefilled.lease.handoff_id
        message.lease.CopyFrom(duration(prefilled.lease.remaining_seconds))
        message.num_tokens = kv.num_tokens
        message.num_bytes = len(kv.block_ids) * owner.layout.block_bytes
        message.block_ids.extend(kv.block_ids)
        message.prefix_hash = kv.prefix_hash
        message.engine_state = kv.engine_state if isinstance(kv, MovingKv) else b""
    return message


def _first_token(kv: HeldKv) -> handoff_pb2.FirstToken:
    return handoff_pb2.FirstToken(
        token_id=kv.first_token,
        logprob=_logprob(kv.logprob) if kv.logprob else None,
        finish_reason=_REASONS[kv.finish_reason] if kv.finish_reason else sampling_pb2.FINISH_REASON_UNSPECIFIED,
    )


def decode_response(worker_id: str, event: Accepted | Tokens | Finished) -> decode_pb2.DecodeResponse:
    """One event of a decode."""
    match event:
        case Tokens(ids, logprobs):
            tokens = decode_pb2.DecodedTokens(token_ids=ids, logprobs=[_logprob(one) for one in logprobs])
            return decode_pb2.DecodeResponse(tokens=tokens)
        case Accepted(timings):
            accepted = decode_pb2.DecodeAccepted(timings=stage_timings(timings, worker_id))
            return decode_pb2.DecodeResponse(accepted=accepted)
        case Finished():
            return decode_pb2.DecodeResponse(finished=_finished(worker_id, event))


def _finished(worker_id: str, event: Finished) -> decode_pb2.DecodeFinished:
    timings = [Timing(timing_pb2.STAGE_DECODE_QUEUE, event.queue_seconds)]
    if event.prefill_seconds:
        timings.append(Timing(timing_pb2.STAGE_PREFILL_COMPUTE, event.prefill_seconds))
    timings.append(Timing(timing_pb2.STAGE_DECODE, event.decode_seconds))
    return decode_pb2.DecodeFinished(
        reason=_REASONS[event.reason],
        usage=handoff_pb2.PromptUsage(prompt_tokens=event.prompt_tokens, cached_tokens=event.cached_tokens),
        timings=stage_timings(timings, worker_id),
    )


def stage_timings(timings: Sequence[Timing], worker_id: str) -> list[timing_pb2.StageTiming]:
    """How long the stages took, on this worker."""
    return [
        timing_pb2.StageTiming(
            stage=timing.stage,
            duration=duration(timing.seconds),
            worker_id=worker_id,
            num_bytes=timing.num_bytes,
            transport=timing.transport,
        )
        for timing in timings
    ]


def _logprob(value: TokenLogprob) -> sampling_pb2.TokenLogprob:
    top = [sampling_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in value.top]
    return sampling_pb2.TokenLogprob(token_id=value.token_id, logprob=value.logprob, top=top)


def get_pool_response(pool: OfferedPool) -> handoff_pb2.GetPoolResponse:
    """How to read this worker's pool."""
    return handoff_pb2.GetPoolResponse(
        worker_id=pool.owner.identity.worker_id,
        epoch=pool.owner.identity.epoch,
        layout=layout(pool.owner.layout),
        num_blocks=pool.num_blocks,
        endpoints=pool.endpoints,
    )


def renew_response(remaining: Iterable[tuple[str, float]]) -> handoff_pb2.RenewResponse:
    """What remains of each lease, by handoff id."""
    leases = [
        handoff_pb2.HandoffLease(handoff_id=handoff_id, still_valid=seconds > 0, remaining=duration(seconds))
        for handoff_id, seconds in remaining
    ]
    return handoff_pb2.RenewResponse(leases=leases)


def list_response(leases: Iterable[Lease]) -> handoff_pb2.ListResponse:
    """Every held handoff, without its secret."""
    handoffs = [
        handoff_pb2.HeldHandoff(
            request_id=lease.request_id,
            num_blocks=len(lease.held.block_ids),
            age=duration(lease.age_seconds),
            remaining=duration(lease.remaining_seconds),
        )
        for lease in leases
    ]
    return handoff_pb2.ListResponse(handoffs=handoffs)


def model_card(facts: ModelFacts) -> worker_pb2.ModelCard:
    """All that a router needs to know."""
    return worker_pb2.ModelCard(
        name=facts.name,
        limits=model_pb2.ModelLimits(
            max_context_tokens=facts.max_context_tokens,
            vocab_size=facts.vocab_size,
            max_logprobs=facts.max_logprobs,
        ),
        capabilities=_capabilities(facts),
        layout=layout(facts.layout),
        eos_token_ids=facts.eos_token_ids,
        tokenizer_json=facts.files.tokenizer_json,
        tokenizer_config_json=facts.files.tokenizer_config_json,
        chat_template=facts.files.chat_template,
        images=_image_rules(facts.images) if facts.images else None,
    )


def _capabilities(facts: ModelFacts) -> model_pb2.ModelCapabilities:
    return model_pb2.ModelCapabilities(
        chat=bool(facts.files.chat_template),
        logprobs=facts.max_logprobs > 0,
        modalities=[media_pb2.MODALITY_IMAGE] if facts.images else [],
    )


def _image_rules(rules: ImageRules) -> worker_pb2.ImageRules:
    return worker_pb2.ImageRules(
        placeholder=rules.placeholder,
        placeholder_token_id=rules.placeholder_token_id,
        tokens_per_image=rules.tokens_per_image,
        embedding_layout_digest=rules.embedding_layout.digest,
        encoder_fingerprint=rules.encoder_fingerprint,
    )


def worker_load(load: EngineLoad) -> cluster_service_pb2.WorkerLoad:
    """What the engine says of itself."""
    return cluster_service_pb2.WorkerLoad(
        running=load.running,
        waiting=load.waiting,
        waiting_prefill_tokens=load.waiting_prefill_tokens,
        blocks_total=load.blocks_total,
        blocks_used=load.blocks_used,
        blocks_held=load.blocks_held,
    )


def kv_change(epoch: int, sequence: int, change: KvChange) -> worker_pb2.SubscribeKvEventsResponse:
    """One message of a subscription to KV events."""
    message = worker_pb2.SubscribeKvEventsResponse(epoch=epoch, sequence=sequence, data_parallel_rank=change.rank)
    match change:
        case KvStored():
            message.stored.block_hashes.extend(change.block_hashes)
        case KvRemoved():
            message.removed.block_hashes.extend(change.block_hashes)
        case KvSnapshot():
            message.snapshot.block_hashes.extend(change.block_hashes)
            # Also where it is empty: it says that nothing is known.
            message.snapshot.SetInParent()
    return message


def interval_seconds(request: worker_pb2.WatchLoadRequest) -> float:
    """How often to look; not more often than every 10 ms."""
    return max(0.01, as_seconds(request.interval)) if request.HasField("interval") else 0.1


def grace_seconds(request: worker_pb2.DrainRequest) -> float | None:
    """How long what runs may go on; None if the request does not say."""
    return max(0.0, as_seconds(request.grace)) if request.HasField("grace") else None


def abort_response(aborted: Aborted) -> worker_pb2.AbortResponse:
    """What an abort has done."""
    return worker_pb2.AbortResponse(
        found=aborted.found,
        stage=aborted.stage,
        tokens_discarded=aborted.tokens_discarded,
        blocks_freed=aborted.blocks_freed,
        milliseconds=aborted.seconds * 1000,
    )


def drain_response(progress: Progress) -> worker_pb2.DrainResponse:
    """How far a drain is."""
    return worker_pb2.DrainResponse(
        running=progress.running, handoffs_held=progress.handoffs_held, drained=progress.drained
    )


def layout(value: KvLayout) -> handoff_pb2.KvLayout:
    """A pool's layout, with its digest."""
    return handoff_pb2.KvLayout(
        digest=value.digest,
        model=value.model,
        dtype=value.dtype,
        num_layers=value.num_layers,
        kv_factor=value.kv_factor,
        kv_heads=value.kv_heads,
        block_tokens=value.block_tokens,
        head_dim=value.head_dim,
        block_bytes=value.block_bytes,
    )


def as_seconds(message: Duration) -> float:
    """A duration as a number."""
    return message.ToNanoseconds() / 1e9


def duration(seconds: float) -> Duration:
    """Relative time, to the nanosecond."""
    message = Duration()
    message.FromNanoseconds(int(seconds * 1e9))
    return message
