"""The answer to an Attach: the state of a kept stream, and the checks that its router may attach to it."""

import asyncio

from baton.engine.v1 import decode_pb2
from baton.errors import FieldViolation, PositionInvalid, StaleAttempt, StreamAdopted
from services.resume.logprobs import KeptLogprobs
from services.resume.stream import KeptStream

# As many as AttachRequest, and the journal, can count: after them only those come that count none.
_MOST_ATTEMPTS = 2**32 - 1

NamesReader = (
    decode_pb2.AttachRequest | decode_pb2.SettleRequest | decode_pb2.YieldRequest | decode_pb2.LendBlocksRequest
)


def attached(stream: KeptStream, request: decode_pb2.AttachRequest) -> decode_pb2.DecodeResponse:
    """The state of a stream, for a router that may attach to it: nothing of it has changed.

    Raises PositionInvalid if the client has more than there is, or if what it lacks is gone.
    """
    stream.drain()
    asked, loop = stream.kept.read(), asyncio.get_running_loop()
    if request.from_tokens > len(stream.ids):
        text = f"the client has {request.from_tokens} tokens; {len(stream.ids)} have been generated"
        raise PositionInvalid([FieldViolation("from_tokens", text)])
    message = decode_pb2.DecodeAttached(
        record=asked.keep.record,
        attachment=stream.attachment,
        execution=asked.keep.execution,
        hop=asked.keep.hop,
        token_ids=stream.ids.tolist(),
        read_tokens=stream.read_tokens,
        is_over=stream.is_over,
    )
    if not request.peek:
        message.prompt.MergeFromString(stream.kept.prompt)
        message.sampling.CopyFrom(asked.sampling)
    if stream.deadline_at is not None and not stream.is_over:
        message.remaining.FromNanoseconds(int(max(0.0, stream.deadline_at - loop.time()) * 1e9))
    if stream.logprobs is not None and not request.peek:
        _add_logprobs(stream.logprobs, request.from_tokens, message)
    return decode_pb2.DecodeResponse(attached=message)


def require_later(stream: KeptStream, request: decode_pb2.AttachRequest) -> None:
    """Raises StaleAttempt unless its attempt is above that of the last Attach; 0 is the next one, whatever came before.

    The reader that goes on after its worker's process was lost makes no attempt. Raises StreamAdopted if it was not the
    last one.
    """
    if request.attachment:
        require_last(stream, request)
        return
    if request.attempt and request.attempt <= stream.attempt:
        raise StaleAttempt(f"attempt {request.attempt} comes after attempt {stream.attempt}")
    stream.attempt = request.attempt or min(stream.attempt + 1, _MOST_ATTEMPTS)


def is_last(stream: KeptStream, caller: NamesReader) -> bool:
    """True if the caller is the last reader of this very decode: one of the same request counts its own from 1."""
    if caller.attachment != stream.attachment:
        return False
    return caller.execution in (0, stream.kept.read().keep.execution)


def require_last(stream: KeptStream, caller: NamesReader) -> None:
    """Raises StreamAdopted unless the caller is the last reader."""
    if not is_last(stream, caller):
        raise StreamAdopted("another router has taken the answer over")


def _add_logprobs(logprobs: KeptLogprobs, start: int, message: decode_pb2.DecodeAttached) -> None:
    if logprobs.of_prompt and not start:
        raise PositionInvalid([FieldViolation("from_tokens", "the log probabilities of the prompt are gone")])
    if logprobs.of_tokens:
        found = logprobs.last(len(message.token_ids) - start)
        if found is None:
            raise PositionInvalid([FieldViolation("from_tokens", "the log probabilities of later tokens are gone")])
        message.logprobs.extend(found)
