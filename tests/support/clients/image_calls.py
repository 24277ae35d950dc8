"""Calls with images to workers with the simulated engine, as a router makes them."""

from collections.abc import Sequence

from support.clients.worker_calls import Decoded, WorkerCalls, sampling
from support.eventually import PATIENCE_SECONDS
from support.images.pictures import picture

from baton.calls import unary
from baton.engine.v1 import decode_pb2, encode_pb2, handoff_pb2, prefill_pb2, prompt_pb2
from baton.inference.v1 import media_pb2

IMAGE_TOKENS = 40
HIDDEN_SIZE = 8
PLACEHOLDER = 257
BEFORE, AFTER = list(b"what is in "), list(b"? tell me in some words")


def image(width: int = 32) -> media_pb2.MediaItem:
    """Returns a picture; a different one for each width."""
    return media_pb2.MediaItem(mime_type="image/png", data=picture("PNG", width=width))


def image_prompt(*embeddings: encode_pb2.Embedding, without: bool = False) -> prompt_pb2.Prompt:
    """Returns text around the images; `without` their embeddings, as with a handoff."""
    ids, media = list(BEFORE), []
    for embedding in embeddings:
        span = prompt_pb2.MediaSpan(start=len(ids), num_tokens=IMAGE_TOKENS, digest=embedding.digest)
        if not without:
            span.embedding.CopyFrom(embedding)
        media.append(span)
        ids += [PLACEHOLDER] * IMAGE_TOKENS
    return prompt_pb2.Prompt(token_ids=ids + AFTER, media=media)


async def prefill_images(calls: WorkerCalls, prompt: prompt_pb2.Prompt, request_id: str = "r") -> handoff_pb2.KvHandoff:
    request = prefill_pb2.PrefillRequest(request_id=request_id, prompt=prompt, sampling=sampling())
    answer = await unary(calls.prefills.Prefill(request, timeout=PATIENCE_SECONDS))
    handoff: handoff_pb2.KvHandoff = answer.handoff
    return handoff


async def decode_images(
    calls: WorkerCalls,
    prompt: prompt_pb2.Prompt,
    handoff: handoff_pb2.KvHandoff | None = None,
    emitted: Sequence[int] | None = None,
    request_id: str = "r",
) -> Decoded:
    if emitted is None:
        emitted = [handoff.first_token.token_id] if handoff else []
    return await calls.decode(
        decode_pb2.DecodeRequest(
            request_id=request_id, prompt=prompt, handoff=handoff, emitted=emitted, sampling=sampling()
        )
    )


async def release_embedding(calls: WorkerCalls, embedding: encode_pb2.Embedding) -> handoff_pb2.ReleaseResponse:
    lease = embedding.lease
    request = handoff_pb2.ReleaseRequest(handoff_id=lease.handoff_id, epoch=lease.epoch)
    released: handoff_pb2.ReleaseResponse = await unary(calls.handoffs.Release(request, timeout=PATIENCE_SECONDS))
    return released


async def renew_embedding(calls: WorkerCalls, embedding: encode_pb2.Embedding) -> bool:
    request = handoff_pb2.RenewRequest(handoff_ids=[embedding.lease.handoff_id], epoch=embedding.lease.epoch)
    answer = await unary(calls.handoffs.Renew(request, timeout=PATIENCE_SECONDS))
    return bool(answer.leases[0].still_valid)
