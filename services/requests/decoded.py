"""The events of a decode, and their messages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.engine.v1 import decode_pb2, handoff_pb2
from baton.inference.v1 import timing_pb2
from services.engines.answer import Finished, Tokens
from services.requests.prompts import FINISH_REASONS, logprob_message, prompt_logprobs_message, set_tiers, set_usage
from services.telemetry.timings import Timing, stage_timings


@dataclass(frozen=True, slots=True)
class Accepted:
    """The first event: the KV is here and confirmed, or the prompt is queued. `timings` are the stages until then."""

    timings: tuple[Timing, ...] = ()


@dataclass(frozen=True, slots=True)
class Yielded:
    """The last event of a decode that goes on elsewhere, with the handoff of its KV, if it had any."""

    finished: Finished
    handoff: handoff_pb2.KvHandoff | None


def tokens_response(ids: Sequence[int]) -> decode_pb2.DecodeResponse:
    """The message of tokens of which nothing is known but their ids."""
    return decode_pb2.DecodeResponse(tokens=decode_pb2.DecodedTokens(token_ids=ids))


def response(worker_id: str, event: Accepted | Tokens | Finished | Yielded) -> decode_pb2.DecodeResponse:
    """Converts an event of a decode to its message."""
    match event:
        case Tokens(ids, logprobs, prompt_logprobs):
            tokens = decode_pb2.DecodedTokens(
                token_ids=ids,
                logprobs=[logprob_message(one) for one in logprobs],
                prompt_logprobs=prompt_logprobs_message(prompt_logprobs),
            )
            return decode_pb2.DecodeResponse(tokens=tokens)
        case Accepted(timings):
            accepted = decode_pb2.DecodeAccepted(timings=stage_timings(timings, worker_id))
            return decode_pb2.DecodeResponse(accepted=accepted)
        case Finished():
            ended = decode_pb2.DecodeFinished(reason=FINISH_REASONS[event.reason], **_figures(worker_id, event))
            return decode_pb2.DecodeResponse(finished=ended)
        case Yielded(finished, handoff):
            yielded = decode_pb2.DecodeYielded(handoff=handoff, **_figures(worker_id, finished))
            return decode_pb2.DecodeResponse(yielded=yielded)


def _figures(worker_id: str, end: Finished) -> dict[str, Any]:
    """The fields of a decode's last message that tell what it took."""
    timings = [Timing(timing_pb2.STAGE_DECODE_QUEUE, end.queue_seconds)]
    if end.prefill_seconds:
        timings.append(Timing(timing_pb2.STAGE_PREFILL_COMPUTE, end.prefill_seconds))
    timings.append(Timing(timing_pb2.STAGE_DECODE, end.decode_seconds))
    usage = handoff_pb2.PromptUsage()
    set_usage(usage, end.prompt_tokens, end.cached_tokens, end.retained)
    set_tiers(usage, end.from_tiers)
    return {
        "usage": usage,
        "timings": stage_timings(timings, worker_id),
        "drafted_tokens": end.drafted_tokens,
        "accepted_tokens": end.accepted_tokens,
        "num_tokens": end.num_tokens,
    }
