"""Calls workers as a router does: stubs, short requests, and collected answers."""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from support.eventually import PATIENCE_SECONDS

from baton.calls import stream, unary
from baton.engine.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    encode_pb2,
    encode_pb2_grpc,
    handoff_pb2,
    handoff_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    prompt_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from baton.inference.v1 import media_pb2, sampling_pb2, timing_pb2
from rpc.channels import open_channel

Metadata = Sequence[tuple[str, str]]
TEXT = b"the quick brown fox jumps over the lazy dog, twice"


@dataclass
class Decoded:
    """Everything that a decode answered."""

    token_ids: list[int] = field(default_factory=list)
    accepted: decode_pb2.DecodeAccepted | None = None
    finished: decode_pb2.DecodeFinished | None = None

    def timing(self, stage: "timing_pb2.Stage.ValueType") -> timing_pb2.StageTiming:
        """The only timing of a stage."""
        assert self.accepted is not None
        timings = [*self.accepted.timings, *(self.finished.timings if self.finished else ())]
        [found] = [timing for timing in timings if timing.stage == stage]
        return found

    @property
    def transport(self) -> str:
        return self.timing(timing_pb2.STAGE_HANDOFF_TRANSFER).transport


class WorkerCalls:
    """One worker's services."""

    def __init__(self, address: str, channel: object) -> None:
        self.address = address
        self.encodes = encode_pb2_grpc.EncodeServiceStub(channel)  # type: ignore[call-overload]
        self.prefills = prefill_pb2_grpc.PrefillServiceStub(channel)  # type: ignore[call-overload]
        self.decodes = decode_pb2_grpc.DecodeServiceStub(channel)  # type: ignore[call-overload]
        self.handoffs = handoff_pb2_grpc.HandoffServiceStub(channel)  # type: ignore[call-overload]
        self.worker = worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[call-overload]

    async def encode(self, *media: media_pb2.MediaItem, request_id: str = "r") -> list[encode_pb2.Embedding]:
        request = encode_pb2.EncodeRequest(request_id=request_id, media=media)
        answer = await unary(self.encodes.Encode(request, timeout=PATIENCE_SECONDS))
        return list(answer.embeddings)

    async def prefill(
        self, request_id: str = "r", text: bytes = TEXT, max_tokens: int = 20, metadata: Metadata = ()
    ) -> handoff_pb2.KvHandoff:
        request = prefill_pb2.PrefillRequest(request_id=request_id, prompt=prompt(text), sampling=sampling(max_tokens))
        answer = await unary(self.prefills.Prefill(request, timeout=PATIENCE_SECONDS, metadata=metadata))
        handoff: handoff_pb2.KvHandoff = answer.handoff
        return handoff

    async def decode(self, request: decode_pb2.DecodeRequest, metadata: Metadata = ()) -> Decoded:
        """Reads to the end; the ids exclude those emitted before."""
        decoded = Decoded()
        call = self.decodes.Decode(request, timeout=PATIENCE_SECONDS, metadata=metadata)
        async with aclosing(stream(call)) as answers:
            async for answer in answers:
                match answer.WhichOneof("event"):
                    case "accepted":
                        decoded.accepted = answer.accepted
                    case "tokens":
                        decoded.token_ids += answer.tokens.token_ids
                    case "finished":
                        decoded.finished = answer.finished
        return decoded

    async def renew(self, handoff: handoff_pb2.KvHandoff) -> handoff_pb2.HandoffLease:
        request = handoff_pb2.RenewRequest(handoff_ids=[handoff.handoff_id], epoch=handoff.epoch)
        answer = await unary(self.handoffs.Renew(request, timeout=PATIENCE_SECONDS))
        lease: handoff_pb2.HandoffLease = answer.leases[0]
        return lease

    async def release(self, handoff: handoff_pb2.KvHandoff, reader: str = "") -> handoff_pb2.ReleaseResponse:
        request = handoff_pb2.ReleaseRequest(handoff_id=handoff.handoff_id, epoch=handoff.epoch, reader=reader)
        released: handoff_pb2.ReleaseResponse = await unary(self.handoffs.Release(request, timeout=PATIENCE_SECONDS))
        return released

    async def abort(self, request_id: str = "r") -> worker_pb2.AbortResponse:
        request = worker_pb2.AbortRequest(request_id=request_id)
        aborted: worker_pb2.AbortResponse = await unary(self.worker.Abort(request, timeout=PATIENCE_SECONDS))
        return aborted


@asynccontextmanager
async def calls_to(address: str) -> AsyncIterator[WorkerCalls]:
    """The services at an address."""
    async with open_channel(address) as channel:
        yield WorkerCalls(address, channel)


def prompt(text: bytes = TEXT) -> prompt_pb2.Prompt:
    """Returns a prompt of one token a byte."""
    return prompt_pb2.Prompt(token_ids=text)


def sampling(max_tokens: int = 20, seed: int = 7) -> prompt_pb2.Sampling:
    """Returns seeded sampling of a fixed length."""
    return prompt_pb2.Sampling(
        params=sampling_pb2.SamplingParams(seed=seed), stop=prompt_pb2.StopConditions(max_tokens=max_tokens)
    )


def decode_request(
    handoff: handoff_pb2.KvHandoff | None = None,
    request_id: str = "r",
    text: bytes = TEXT,
    max_tokens: int = 20,
    emitted: Sequence[int] | None = None,
) -> decode_pb2.DecodeRequest:
    """Returns a router's request after a prefill or, without a handoff, instead of one."""
    if emitted is None:
        emitted = [handoff.first_token.token_id] if handoff else []
    return decode_pb2.DecodeRequest(
        request_id=request_id, prompt=prompt(text), handoff=handoff, emitted=emitted, sampling=sampling(max_tokens)
    )
