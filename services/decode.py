"""The decode role: runs a request to its end, from KV that another worker holds, or from its prompt."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from baton.engine.v1 import decode_pb2, decode_pb2_grpc
from baton.errors import InvalidRequest
from baton.inference.v1 import timing_pb2
from engine_protocol.lane import SendTokens, TokenReply
from rpc.metadata import remaining_seconds
from rpc.server import Service
from rpc.tracing.span import current_span, optional_attempt
from runtime.clock import perf_counter
from services.engines.answer import Finished, Tokens
from services.engines.base import Engine
from services.engines.generation import Generation
from services.engines.prompt import Prompt, Sampling
from services.handoff import spans as traces
from services.handoff.destinations import Allocator
from services.handoff.fetcher import Fetcher
from services.handoff.prefetch import Followed, read_followed
from services.handoff.pull import Puller
from services.handoff.remote_handoff import Handoff, read_handoff
from services.identity import Identity
from services.multimodal.media_resolver import MediaResolver
from services.multimodal.media_spans import read_spans
from services.parts import WorkerParts
from services.requests.calls import Calls, RunningCall
from services.requests.fault_injection import NO_FAULTS, Faults, Metadata
from services.requests.loras import require_lora, using_lora
from services.requests.prompts import (
    FINISH_REASONS,
    check_limits,
    logprob_message,
    prompt_logprobs_message,
    read_prompt,
    read_sampling,
    set_tiers,
    set_usage,
)
from services.resume.stream import KeptStream
from services.resume.streams import KeptStreams, attached, require_later
from services.telemetry import metrics
from services.telemetry.timings import CallClock, DecodeClock, Timing, stage_timings

SERVICE_NAME = decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """DecodeService. Only a worker without an engine, which never has the role, has no `decoder`."""

    def __init__(
        self,
        identity: Identity,
        calls: Calls,
        media: MediaResolver,
        decoder: "Decoder | None",
        kept: KeptStreams,
    ) -> None:
        self._kept = kept
        self._identity = identity
        self._calls = calls
        self._media = media
        self._decoder = decoder

    async def Allocate(self, request: decode_pb2.AllocateRequest, context: Any) -> decode_pb2.AllocateResponse:
        with self._calls.run("decode", request.request_id, request.model, context.invocation_metadata()) as call:
            assert self._decoder is not None
            call.stage = timing_pb2.STAGE_HANDOFF_WAIT
            prompt = self._media.with_inline_embeddings(read_prompt(request), read_spans(request.prompt))
            return await self._decoder.allocator.allocate(request, prompt, read_sampling(request.sampling), context)

    async def Prefetch(self, request: decode_pb2.PrefetchRequest, context: Any) -> decode_pb2.PrefetchResponse:
        metadata = context.invocation_metadata()
        with optional_attempt(), self._calls.run("prefetch", request.request_id, request.model, metadata) as call:
            assert self._decoder is not None
            prompt = self._media.with_inline_embeddings(read_prompt(request), read_spans(request.prompt))
            return await self._decoder.prefetch(read_followed(request), prompt, call)

    # Writes instead of yielding: a call that is stopped while it writes is then stopped within `run`.
    async def Decode(self, request: decode_pb2.DecodeRequest, context: Any) -> None:  # type: ignore[override]
        current_span().link(request.handoff.traceparent, "prefill")
        if request.HasField("keep"):
            await self._decode_kept(request, context)
            return
        with self._calls.run("decode", request.request_id, request.model, context.invocation_metadata()) as call:
            assert self._decoder is not None
            work = await self._read(request, call.clock)
            reply: TokenReply = context.reply()
            send = partial(reply.write_from, message_of=_tokens_response)
            async with aclosing(self._decoder.decode(work, call, send)) as events:
                async for event in events:
                    await reply.write(_response(self._identity.worker_id, event))

    async def Attach(self, request: decode_pb2.AttachRequest, context: Any) -> None:  # type: ignore[override]
        stream = self._kept.authorized(request)
        message = attached(stream, request)
        reply: TokenReply = context.reply()
        if request.peek:
            await reply.write(message)
            return
        require_later(stream, request.attempt)
        with self._kept.reading(stream, len(message.attached.token_ids)) as reader:
            message.attached.attachment = stream.attachment
            await reply.write(message)
            await reader.write_to(reply)

    async def Settle(self, request: decode_pb2.SettleRequest, context: Any) -> decode_pb2.SettleResponse:
        self._kept.settle(request)
        return decode_pb2.SettleResponse()

    async def FindStreams(self, request: decode_pb2.FindStreamsRequest, context: Any) -> decode_pb2.FindStreamsResponse:
        return decode_pb2.FindStreamsResponse(found=self._kept.find(request.request_ids))

    async def _decode_kept(self, request: decode_pb2.DecodeRequest, context: Any) -> None:
        """Reads a decode that goes on, for a while, when this call does not."""
        run = partial(self._run_kept, request, context.invocation_metadata())
        stream = await self._kept.start(request, run, remaining_seconds(context))
        with self._kept.reading(stream, len(request.emitted)) as reader:
            await reader.write_to(context.reply())

    async def _run_kept(self, request: decode_pb2.DecodeRequest, metadata: Metadata, stream: KeptStream) -> None:
        with self._calls.run("decode", request.request_id, request.model, metadata) as call:
            assert self._decoder is not None
            work = await self._read(request, call.clock)
            async with aclosing(self._decoder.decode(work, call, stream.send)) as events:
                async for event in events:
                    match event:
                        case Tokens():
                            stream.add(event)
                        case Accepted():
                            stream.accept(_response(self._identity.worker_id, event))
                        case Finished():
                            stream.finished = _response(self._identity.worker_id, event)

    async def _read(self, request: decode_pb2.DecodeRequest, clock: CallClock) -> "DecodeWork":
        given, spans = read_prompt(request), read_spans(request.prompt)
        sampling = read_sampling(request.sampling)
        if request.HasField("handoff"):
            prompt = self._media.with_inline_embeddings(given, spans)
            handoff = read_handoff(request.handoff)
            return DecodeWork(prompt, sampling, handoff, request.request_id, request.destination_id)
        if request.destination_id:
            raise InvalidRequest.of("destination_id", "comes without a handoff")
        return DecodeWork(await self._media.with_embeddings(given, spans, clock), sampling, handoff=None)


@asynccontextmanager
async def open_service(parts: WorkerParts) -> AsyncIterator[Service]:
    """Opens the role on a worker; one without it answers RoleMismatch."""
    worker, engine = parts.worker, parts.worker.engine
    async with AsyncExitStack() as stack:
        decoder = None
        if engine is not None:
            puller = await stack.enter_async_context(Puller(engine, parts.peers, parts.transports))
            transfer = engine.kv_transfer
            fetcher = Fetcher(transfer, engine.facts.layout, parts.peers) if transfer else None
            decoder = Decoder(engine, puller, fetcher, Allocator(engine, worker.identity, worker.leases))
        servicer = DecodeServicer(worker.identity, parts.calls, parts.media, decoder, worker.kept)
        yield Service(SERVICE_NAME, decode_pb2_grpc.add_DecodeServiceServicer_to_server, servicer)


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """A request to decode. Without a handoff its prompt is computed here."""

    prompt: Prompt
    sampling: Sampling
    handoff: Handoff | None
    request_id: str = ""
    destination_id: str = ""  # blocks that were allocated for it before; empty without them


@dataclass(frozen=True, slots=True)
class Accepted:
    """The first event: the KV is here and confirmed, or the prompt is queued. `timings` are the stages until then."""

    timings: tuple[Timing, ...] = ()


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A decode whose KV or prompt is ready. `generate` is called once."""

    accepted: Accepted
    generate: Callable[[], Generation]


class Decoder:
    """Runs decodes on an engine. KV from elsewhere is pulled, or fetched by an engine that transfers KV itself."""

    def __init__(self, engine: Engine, puller: Puller, fetcher: Fetcher | None, allocator: Allocator) -> None:
        self.allocator = allocator
        self._engine = engine
        self._puller = puller
        self._fetcher = fetcher

    async def prefetch(self, followed: Followed, prompt: Prompt, call: RunningCall) -> decode_pb2.PrefetchResponse:
        """Pulls blocks of a prompt that is being computed, for its decode. Raises as Prefetcher.run does."""
        check_limits(self._engine.facts, prompt, Sampling(max_tokens=1))
        require_lora(self._engine, prompt)
        return await self._puller.prefetcher.run(followed, prompt, call)

    async def decode(
        self, work: DecodeWork, call: RunningCall, send: SendTokens
    ) -> AsyncGenerator[Accepted | Tokens | Finished, None]:
        """Yields Accepted, tokens, Finished. Raises what Puller.pull, Fetcher.decode_remote and the engine raise.

        Tokens of which nothing is known but their ids, and between which nothing has to be done, go to `send` instead.

        Closing it, or cancelling the task that reads it, frees everything on both workers.
        """
        check_limits(self._engine.facts, work.prompt, work.sampling)
        require_lora(self._engine, work.prompt)
        await call.faults.inject("queue")
        async with self._prepared(work, call) as prepared:
            yield prepared.accepted
            clock = DecodeClock(call.clock, is_pulled=work.handoff is not None)
            async with aclosing(prepared.generate()) as generation:
                if _is_plain(work, call):
                    source = TimedTokens(generation, clock)
                    await send(source)
                    metrics.observe_decode(source.finished, is_pulled=clock.is_pulled)
                    traces.decoded(source.finished, clock, source.generated)
                    yield source.finished
                    return
                generated = len(work.prompt.emitted)
                async for event in generation:
                    timed = clock.observe(event)
                    if not isinstance(timed, Tokens):
                        metrics.observe_decode(timed, is_pulled=clock.is_pulled)
                        traces.decoded(timed, clock, generated - len(work.prompt.emitted))
                        yield timed
                        continue
                    metrics.GENERATED_TOKENS.inc(len(timed.ids))
                    for piece in _split_at_faults(timed, generated, call.faults):
                        yield piece
                        generated += len(piece.ids)
                        await _inject(call.faults, generated, clock)

    @asynccontextmanager
    async def _prepared(self, work: DecodeWork, call: RunningCall) -> AsyncIterator[_Prepared]:
        if work.handoff is None:
            generate = partial(self._engine.generation, work.prompt, work.sampling)
            async with using_lora(self._engine, work.prompt):
                yield _Prepared(Accepted(tuple(call.clock.timings)), generate)
        elif self._fetcher is not None:
            take = partial(self.allocator.take, work.destination_id, work.request_id) if work.destination_id else None
            # The adapter before the KV, which the engine takes and goes on from in one request.
            async with (
                using_lora(self._engine, work.prompt),
                self._fetcher.decode_remote(work.handoff, work.prompt, work.sampling, call, take) as fetched,
            ):
                call.clock.add(fetched.timings)
                yield _Prepared(Accepted(fetched.timings), lambda: fetched.generation)
        else:
            # The adapter after the KV: until it is confirmed, another worker's blocks are held.
            async with (
                self._puller.pull(work.handoff, work.prompt, call) as pulled,
                using_lora(self._engine, work.prompt),
            ):
                call.clock.add(pulled.timings)
                yield _Prepared(Accepted(pulled.timings), partial(self._engine.generation, pulled.kv, work.sampling))


class TimedTokens:
    """The TokenSource of a generation, whose tokens are timed and counted. `finished` is set at their end."""

    finished: Finished

    def __init__(self, generation: Generation, clock: DecodeClock) -> None:
        self.subscribe = generation.subscribe
        self.generated = 0
        self._generation = generation
        self._clock = clock

    def pull(self) -> tuple[Sequence[int], bool]:
        """The new ids, and whether they were the last. Raises what ended the generation, if it failed."""
        ids, end = self._generation.pull()
        if ids:
            if not self.generated:
                self._clock.note_tokens()
            self.generated += len(ids)
        if end is None:
            return ids, False
        metrics.GENERATED_TOKENS.inc(self.generated)
        self.finished = self._clock.completed(end)
        return ids, True


def _is_plain(work: DecodeWork, call: RunningCall) -> bool:
    """True if a token is its id alone, and nothing is planned between two of them."""
    options = work.sampling
    return options.logprobs is None and options.prompt_logprobs is None and call.faults is NO_FAULTS


async def _inject(faults: Faults, generated: int, clock: DecodeClock) -> None:
    if faults is NO_FAULTS:
        return
    started = perf_counter()
    await faults.inject("decode", generated)
    clock.add_fault(perf_counter() - started)


def _split_at_faults(tokens: Tokens, generated: int, faults: Faults) -> list[Tokens]:
    """Splits tokens where a fault is planned, so that the tokens before it are sent first."""
    cuts = [count - generated for count in faults.token_counts if generated < count < generated + len(tokens.ids)]
    if not cuts:
        return [tokens]
    starts, ends = [0, *cuts], [*cuts, len(tokens.ids)]
    pieces = [
        Tokens(tokens.ids[start:end], tokens.logprobs[start:end]) for start, end in zip(starts, ends, strict=True)
    ]
    return [replace(pieces[0], prompt_logprobs=tokens.prompt_logprobs), *pieces[1:]]


def _tokens_response(ids: Sequence[int]) -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(tokens=decode_pb2.DecodedTokens(token_ids=ids))


def _response(worker_id: str, event: Accepted | Tokens | Finished) -> decode_pb2.DecodeResponse:
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
            return decode_pb2.DecodeResponse(finished=_finished(worker_id, event))


def _finished(worker_id: str, event: Finished) -> decode_pb2.DecodeFinished:
    timings = [Timing(timing_pb2.STAGE_DECODE_QUEUE, event.queue_seconds)]
    if event.prefill_seconds:
        timings.append(Timing(timing_pb2.STAGE_PREFILL_COMPUTE, event.prefill_seconds))
    timings.append(Timing(timing_pb2.STAGE_DECODE, event.decode_seconds))
    message = decode_pb2.DecodeFinished(
        reason=FINISH_REASONS[event.reason],
        timings=stage_timings(timings, worker_id),
        drafted_tokens=event.drafted_tokens,
        accepted_tokens=event.accepted_tokens,
    )
    set_usage(message.usage, event.prompt_tokens, event.cached_tokens, event.retained)
    set_tiers(message.usage, event.from_tiers)
    return message
