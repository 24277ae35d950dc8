"""The decode role: runs a request to its end, from KV that another worker holds, or from its prompt."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from baton.engine.v1 import decode_pb2, decode_pb2_grpc
from baton.errors import InvalidRequest
from baton.inference.v1 import timing_pb2
from engine_protocol.lane import SendTokens, TokenReply
from rpc.auth.caller import certificate
from rpc.metadata import remaining_seconds
from rpc.server import Service
from rpc.tracing.span import current_span, optional_attempt
from runtime.clock import perf_counter
from services.engines.answer import Finished, FinishReason, Tokens
from services.engines.base import Engine
from services.engines.journal.journal import RecoveredDecode
from services.engines.journal.slots import Slot
from services.engines.kv import PulledKv, Reservation
from services.engines.prompt import Prompt, Sampling
from services.engines.running.generation import Generation
from services.handoff import spans as traces
from services.handoff.borrowing import PrefixSource, read_source
from services.handoff.destinations import Allocator
from services.handoff.fetcher import Fetcher
from services.handoff.prefetch import Followed, read_followed
from services.handoff.pull import Puller
from services.handoff.remote_handoff import Handoff, read_handoff
from services.handoff.service import release_if_undelivered
from services.moving.running import RunningDecode
from services.moving.warming import Warmer
from services.multimodal.media_resolver import MediaResolver
from services.multimodal.media_spans import read_spans
from services.parts import WorkerParts
from services.requests.bounds import require_digests, require_keep, require_readers
from services.requests.calls import RunningCall
from services.requests.decoded import Accepted, Yielded, response, tokens_response
from services.requests.fault_injection import NO_FAULTS, Faults, Metadata
from services.requests.loras import require_lora, using_lora
from services.requests.prompts import PromptRequest, check_limits, read_prompt, read_sampling
from services.resume.attaching import attached, require_later
from services.resume.stream import KeptStream
from services.resume.takeover import LeftStream, no_slot, release
from services.telemetry import metrics
from services.telemetry.timings import CallClock, DecodeClock

SERVICE_NAME = decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """A request to decode. Without a handoff its prompt is computed here."""

    request_id: str
    prompt: Prompt
    sampling: Sampling
    handoff: Handoff | None
    destination_id: str = ""  # blocks that were allocated for it before; empty without them
    source: PrefixSource | None = None  # another worker that may have the beginning of the prompt
    reservation: Reservation | None = None  # what the worker's last process has computed of it
    open_slot: Callable[[], Slot | None] = no_slot  # in the journal, before it begins


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Reads requests of DecodeService. Its methods raise InvalidRequest with the field that is wrong."""

    media: MediaResolver

    async def prompt(self, request: PromptRequest) -> Prompt:
        """The prompt with the embeddings that the request contains."""
        given = await read_prompt(request, self.media.facts)
        return self.media.with_inline_embeddings(given, read_spans(request.prompt))

    async def work(self, request: decode_pb2.DecodeRequest, clock: CallClock) -> DecodeWork:
        """The work of a decode, with all embeddings if its prompt is computed here; `clock` gets their time."""
        sampling = read_sampling(request.sampling)
        if request.HasField("handoff"):
            prompt = await self.prompt(request)
            handoff = read_handoff(request.handoff)
            return DecodeWork(request.request_id, prompt, sampling, handoff, request.destination_id)
        if request.destination_id:
            raise InvalidRequest.of("destination_id", "comes without a handoff")
        given = await read_prompt(request, self.media.facts)
        prompt = await self.media.with_embeddings(given, read_spans(request.prompt), clock)
        return DecodeWork(request.request_id, prompt, sampling, handoff=None, source=read_source(request))


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """DecodeService. Only a worker without an engine, which never has the role, has no `decoder`."""

    def __init__(self, parts: WorkerParts, decoder: "Decoder | None") -> None:
        self._kept = parts.worker.kept
        self._decodes = parts.decodes
        self._leases = parts.worker.leases
        self._identity = parts.worker.identity
        self._calls = parts.calls
        self._requests = RequestReader(parts.media)
        self._decoder = decoder

    async def Allocate(self, request: decode_pb2.AllocateRequest, context: Any) -> decode_pb2.AllocateResponse:
        with self._calls.run("decode", request.request_id, request.model, context.invocation_metadata()) as call:
            assert self._decoder is not None
            call.stage = timing_pb2.STAGE_HANDOFF_WAIT
            prompt = await self._requests.prompt(request)
            await call.awake()
            return await self._decoder.allocator.allocate(request, prompt, read_sampling(request.sampling), context)

    async def Prefetch(self, request: decode_pb2.PrefetchRequest, context: Any) -> decode_pb2.PrefetchResponse:
        metadata = context.invocation_metadata()
        with optional_attempt(), self._calls.run("prefetch", request.request_id, request.model, metadata) as call:
            assert self._decoder is not None
            prompt = await self._requests.prompt(request)
            return await self._decoder.prefetch(read_followed(request), prompt, call)

    # Writes instead of yielding: a call that is stopped while it writes is then stopped within `run`.
    async def Decode(self, request: decode_pb2.DecodeRequest, context: Any) -> None:  # type: ignore[override]
        relation = "decode" if request.handoff.is_yielded else "prefill"
        current_span().link(request.handoff.traceparent, relation)
        if request.HasField("keep"):
            await self._decode_kept(request, context)
            return
        with self._run(request, context.invocation_metadata()) as call:
            assert self._decoder is not None
            work = await self._requests.work(request, call.clock)
            reply: TokenReply = context.reply()
            send = partial(reply.write_from, message_of=tokens_response)
            async with aclosing(self._decoder.decode(work, call, send)) as events:
                async for event in events:
                    if isinstance(event, Yielded) and event.handoff is not None:
                        release_if_undelivered(context, [event.handoff.handoff_id], self._leases)
                    await reply.write(response(self._identity.worker_id, event))

    async def Attach(self, request: decode_pb2.AttachRequest, context: Any) -> None:  # type: ignore[override]
        if request.epoch:
            self._identity.require_epoch(request.epoch)
        stream = self._kept.authorized(request)
        message = attached(stream, request)
        reply: TokenReply = context.reply()
        if request.peek:
            await reply.write(message)
            return
        require_later(stream, request)
        with self._kept.reading(stream, len(message.attached.token_ids)) as reader:
            message.attached.attachment = stream.attachment
            await reply.write(message)
            await reader.write_to(reply)

    async def Settle(self, request: decode_pb2.SettleRequest, context: Any) -> decode_pb2.SettleResponse:
        return decode_pb2.SettleResponse(is_settled=self._kept.settle(request))

    async def FindStreams(self, request: decode_pb2.FindStreamsRequest, context: Any) -> decode_pb2.FindStreamsResponse:
        for index, answer in enumerate(request.cancelled):
            require_digests(f"cancelled[{index}]", answer)
        return decode_pb2.FindStreamsResponse(found=self._kept.find(request))

    async def Yield(self, request: decode_pb2.YieldRequest, context: Any) -> decode_pb2.YieldResponse:
        self._kept.require_reader(request)
        running = await self._decodes.yield_next(request.request_id, self._readers(request))
        return decode_pb2.YieldResponse(is_running=running)

    async def LendBlocks(self, request: decode_pb2.LendBlocksRequest, context: Any) -> decode_pb2.LendBlocksResponse:
        self._kept.require_reader(request)
        readers = self._readers(request)
        handoff = await self._decodes.lend(request.request_id, request.num_tokens, readers)
        if handoff is not None:
            release_if_undelivered(context, [handoff.handoff_id], self._leases)
        return decode_pb2.LendBlocksResponse(handoff=handoff)

    async def Warm(self, request: decode_pb2.WarmRequest, context: Any) -> decode_pb2.WarmResponse:
        metadata = context.invocation_metadata()
        with optional_attempt(), self._calls.run("warm", request.request_id, request.model, metadata) as call:
            assert self._decoder is not None
            await call.faults.inject("warm")
            call.faults = NO_FAULTS  # the others are planned for the decode
            prompt = await self._requests.prompt(request)
            await call.awake()
            num_bytes = await self._decoder.warmer.warm(read_handoff(request.handoff), prompt, call)
        return decode_pb2.WarmResponse(num_bytes=num_bytes)

    def _readers(self, request: decode_pb2.YieldRequest | decode_pb2.LendBlocksRequest) -> frozenset[str]:
        """The certificates that may read a decode's KV, this worker's too; any caller may, if there are none."""
        require_readers(request)
        if not certificate():
            return frozenset()
        return frozenset({certificate(), self._identity.certificate, *request.readers} - {""})

    async def _decode_kept(self, request: decode_pb2.DecodeRequest, context: Any) -> None:
        """Reads a decode that goes on, for a while, when this call does not."""
        require_keep(request.keep)
        run = partial(self._run_kept, request, context.invocation_metadata())
        stream = await self._kept.start(request, run, remaining_seconds(context))
        with self._kept.reading(stream, len(request.emitted)) as reader:
            await reader.write_to(context.reply())

    async def _run_kept(self, request: decode_pb2.DecodeRequest, metadata: Metadata, stream: KeptStream) -> None:
        with self._run(request, metadata) as call:
            await self._generate(stream, await self._requests.work(request, call.clock), call)

    def take_over(self, recovered: Sequence[RecoveredDecode]) -> None:
        """Goes on with the kept decodes that the worker's last process has left."""
        for decode in recovered:
            left = LeftStream.read(decode)
            self._kept.take_over(left, partial(self._run_left, left))

    async def _run_left(self, left: LeftStream, stream: KeptStream) -> None:
        try:
            with self._run(left.request, ()) as call:
                reservation = left.reservation()
                if reservation is None:
                    await release(left.decode)
                prompt = await self._requests.prompt(left.request)
                sampling = read_sampling(left.request.sampling)
                work = DecodeWork(stream.kept.request_id, prompt, sampling, None, reservation=reservation)
                await self._generate(stream, work, call)
        finally:
            await release(left.decode)

    async def _generate(self, stream: KeptStream, work: DecodeWork, call: RunningCall) -> None:
        assert self._decoder is not None
        work = replace(work, open_slot=partial(self._kept.slot_for, stream))
        async with aclosing(self._decoder.decode(work, call, stream.send)) as events:
            async for event in events:
                match event:
                    case Tokens():
                        stream.add(event)
                    case Accepted():
                        stream.accept(response(self._identity.worker_id, event))
                    case Yielded(_, handoff) if handoff is not None:
                        free = partial(self._leases.discard, handoff.handoff_id)
                        stream.finish(response(self._identity.worker_id, event), free)
                    case Finished() | Yielded():
                        stream.finish(response(self._identity.worker_id, event))

    def _run(self, request: decode_pb2.DecodeRequest, metadata: Metadata) -> AbstractContextManager[RunningCall]:
        own = self._identity.worker_id, self._identity.epoch
        is_return = request.HasField("handoff") and (request.handoff.worker_id, request.handoff.epoch) == own
        return self._calls.run("decode", request.request_id, request.model, metadata, is_return=is_return)


@asynccontextmanager
async def open_service(parts: WorkerParts) -> AsyncIterator[Service]:
    """Opens the role on a worker; one without it answers RoleMismatch."""
    engine = parts.worker.engine
    async with AsyncExitStack() as stack:
        decoder = None
        if engine is not None:
            check_every = parts.config.handoff.check_every
            puller = await stack.enter_async_context(Puller(engine, parts.peers, parts.transports, check_every))
            transfer = engine.kv_transfer
            fetcher = Fetcher(transfer, engine.facts.layout, parts.peers) if transfer else None
            decoder = Decoder(engine, puller, fetcher, parts)
        servicer = DecodeServicer(parts, decoder)
        if engine is not None:
            servicer.take_over(engine.pop_recovered())
        yield Service(SERVICE_NAME, decode_pb2_grpc.add_DecodeServiceServicer_to_server, servicer)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A decode whose KV or prompt is ready. `generate` is called once."""

    accepted: Accepted
    generate: Callable[[], Generation]


class Decoder:
    """Runs decodes on an engine. KV from elsewhere is pulled, or fetched by an engine that transfers KV itself."""

    def __init__(self, engine: Engine, puller: Puller, fetcher: Fetcher | None, parts: WorkerParts) -> None:
        self._borrower = parts.borrower
        self._decodes = parts.decodes
        self.allocator = Allocator(engine, parts.worker.identity, parts.worker.leases)
        self.warmer = Warmer(engine, puller)
        self._engine = engine
        self._puller = puller
        self._fetcher = fetcher

    async def prefetch(self, followed: Followed, prompt: Prompt, call: RunningCall) -> decode_pb2.PrefetchResponse:
        """Pulls blocks of a prompt that is being computed, for its decode. Raises as Prefetcher.run does."""
        await check_limits(self._engine.facts, prompt, Sampling(max_tokens=1))
        require_lora(self._engine, prompt)
        await call.awake()
        return await self._puller.prefetcher.run(followed, prompt, call)

    async def decode(
        self, work: DecodeWork, call: RunningCall, send: SendTokens
    ) -> AsyncGenerator[Accepted | Tokens | Finished | Yielded, None]:
        """Yields Accepted, tokens, and Finished or Yielded. Raises what Puller, Fetcher and the engine raise.

        Tokens of which nothing is known but their ids, and between which nothing has to be done, go to `send` instead.
        Closing it, or cancelling the task that reads it, frees everything on both workers.
        """
        await check_limits(self._engine.facts, work.prompt, work.sampling)
        require_lora(self._engine, work.prompt)
        await call.awake(has_kv=work.reservation is not None)
        await call.faults.inject("queue")
        async with self._prepared(work, call) as prepared:
            yield prepared.accepted
            clock = DecodeClock(call.clock, is_pulled=work.handoff is not None or work.reservation is not None)
            async with aclosing(prepared.generate()) as generation:
                if (slot := work.open_slot()) is not None:
                    generation.outlive(slot)
                with self._decodes.running(work.request_id, work.prompt, generation, call) as decode:
                    if _is_plain(work, call):
                        generated = await send(generation if clock.is_pulled else TimedPrompt(generation, clock))
                        _, end = generation.pull()  # once more: it goes on telling its end
                        assert end is not None
                        metrics.GENERATED_TOKENS.inc(generated)
                        decode.ended(end)
                        yield _end(decode, clock.completed(end, len(work.prompt.emitted) + generated), clock, generated)
                        return
                    generated = len(work.prompt.emitted)
                    async for event in generation:
                        timed = clock.observe(event, generated)
                        if not isinstance(timed, Tokens):
                            decode.ended(timed)
                            yield _end(decode, timed, clock, generated - len(work.prompt.emitted))
                            continue
                        metrics.GENERATED_TOKENS.inc(len(timed.ids))
                        for piece in call.faults.split(timed, generated):
                            yield piece
                            generated += len(piece.ids)
                            await _inject(call.faults, generated, clock)

    @asynccontextmanager
    async def _prepared(self, work: DecodeWork, call: RunningCall) -> AsyncIterator[_Prepared]:
        if work.reservation is not None:
            left = PulledKv(work.prompt, work.reservation)
            async with using_lora(self._engine, work.prompt):
                yield _Prepared(Accepted(), partial(self._engine.generation, left, work.sampling))
        elif work.handoff is None:
            generate = partial(self._engine.generation, work.prompt, work.sampling)
            async with using_lora(self._engine, work.prompt):
                await self._borrower.borrow(work.source, work.prompt, call)
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


class TimedPrompt:
    """The TokenSource of a generation that computes its prompt, of which the first tokens are the end."""

    __slots__ = ("_clock", "_generation")

    def __init__(self, generation: Generation, clock: DecodeClock) -> None:
        self._generation = generation
        self._clock = clock

    async def subscribe(self, ready: Callable[[], None]) -> None:
        """Begins, and calls `ready` whenever `pull` has something new."""
        await self._generation.subscribe(ready)

    def pull(self) -> tuple[Sequence[int], Finished | None]:
        """The new ids, and the end. Raises what ended the generation, if it failed."""
        ids, end = self._generation.pull()
        if ids and self._clock.first_at is None:
            self._clock.record_tokens()
        return ids, end


def _end(decode: RunningDecode, finished: Finished, clock: DecodeClock, generated: int) -> Finished | Yielded:
    """The last event of a decode, which is recorded."""
    # Of an answer that was complete before, no prompt was run.
    metrics.observe_decode(finished, is_pulled=clock.is_pulled or not generated)
    traces.decoded(finished, clock, generated)
    return Yielded(finished, decode.hand_over()) if finished.reason is FinishReason.YIELDED else finished


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
