"""The prefill role: computes a prompt's KV, samples the first token, and holds the KV under a lease."""

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from baton.engine.v1 import handoff_pb2, prefill_pb2, prefill_pb2_grpc
from baton.errors import Unsupported
from baton.inference.v1 import sampling_pb2
from rpc.auth.caller import certificate
from rpc.server import Service
from rpc.tracing.span import current_span
from runtime.clock import perf_counter
from services.engines.answer import FromTiers
from services.engines.base import Engine
from services.engines.kv import HeldKv, ReportedPrompt, RetainedPrompt, TieredPrompt
from services.engines.kv_transfer import AllocatesFirst, EngineHeldKv
from services.engines.prompt import Prompt, Sampling
from services.handoff import spans as traces
from services.handoff.borrowing import PrefixBorrower, PrefixSource, read_source
from services.handoff.early import PromptInProgress, PromptsInProgress
from services.handoff.leases import Lease, LeaseTable
from services.handoff.service import HandoffOwner, release_if_undelivered
from services.identity import Identity
from services.multimodal.media_resolver import MediaResolver
from services.multimodal.media_spans import read_spans
from services.parts import WorkerParts
from services.requests.bounds import require_names
from services.requests.calls import Calls, RunningCall
from services.requests.fault_injection import NO_FAULTS, corrupt
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
from services.telemetry import metrics
from services.telemetry.timings import Timing, stage_timings

SERVICE_NAME = prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """PrefillService. Only a worker without an engine, which never has the role, has no `prefiller`."""

    def __init__(self, calls: Calls, media: MediaResolver, prefiller: "Prefiller | None") -> None:
        self._calls = calls
        self._media = media
        self._prefiller = prefiller

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> prefill_pb2.PrefillResponse:
        with self._calls.run("prefill", request.request_id, request.model, context.invocation_metadata()) as call:
            assert self._prefiller is not None
            given, sampling = await read_prompt(request, self._media.facts), read_sampling(request.sampling)
            prompt = await self._media.with_embeddings(given, read_spans(request.prompt), call.clock)
            prefilled = await self._prefiller.prefill(_holder(request), prompt, sampling, call, read_source(request))
        return self._prefiller.respond(prefilled, context)


@dataclass(frozen=True, slots=True)
class Holder:
    """The request that KV is held for, the certificates that may read it (any caller may, if there are none), and where
    it goes.
    """

    request_id: str
    certificates: frozenset[str] = frozenset()
    destination: bytes | None = None  # the state of what the decode worker has allocated for it, if it has


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The result of a prefill. `lease` is None if the first token ended the request."""

    kv: HeldKv
    prompt: Prompt
    lease: Lease | None
    timings: tuple[Timing, ...]
    from_tiers: FromTiers


class Prefiller:
    """Runs prompts on an engine, and holds their KV in the lease table."""

    def __init__(
        self,
        engine: Engine,
        identity: Identity,
        leases: LeaseTable,
        prompts: PromptsInProgress,
        borrower: PrefixBorrower,
    ) -> None:
        self._engine = engine
        self._borrower = borrower
        self._prompts = prompts
        self._owner = HandoffOwner(identity, engine.facts.layout)
        self._leases = leases
        self._layout_digest = engine.facts.layout.digest

    async def prefill(
        self,
        holder: Holder,
        prompt: Prompt,
        sampling: Sampling,
        call: RunningCall,
        source: PrefixSource | None = None,
    ) -> Prefilled:
        """Computes the KV and holds it. Raises what the engine raises; cancelling it frees everything.

        `source` is another worker that may have its beginning.
        """
        await check_limits(self._engine.facts, prompt, sampling)
        require_lora(self._engine, prompt)
        await call.awake()
        await call.faults.inject("queue")
        await self._borrower.borrow(source, prompt, call)
        asked = perf_counter()
        with self._in_progress(holder, prompt) as progress:
            async with using_lora(self._engine, prompt):
                kv = await self._computed(holder.destination, prompt, sampling, progress)
            if call.faults is not NO_FAULTS:
                await self._inject_after_prefill(kv, call)
            # From the engine to the lease table without an await in between, so that a cancellation loses no blocks.
            lease = self._hold(holder, kv, progress) if kv.finish_reason is None else None
        if lease and call.faults is not NO_FAULTS:
            await self._inject_while_held(lease, call)
        timings = call.clock.prefilled(asked, kv.queue_seconds)
        metrics.observe_prefill(timings, kv, len(prompt.token_ids))
        traces.prefilled(timings, kv, len(prompt.token_ids))
        below = kv.from_tiers if isinstance(kv, TieredPrompt) else FromTiers()
        return Prefilled(kv, prompt, lease, timings, call.clock.origins(below, kv.cached_tokens))

    def respond(self, prefilled: Prefilled, context: Any) -> prefill_pb2.PrefillResponse:
        """Returns the response, whose handoff is released if the caller is gone before it is sent."""
        if prefilled.lease:
            release_if_undelivered(context, [prefilled.lease.handoff_id], self._leases)
        response = _response(self._owner, prefilled)
        response.handoff.traceparent = current_span().traceparent
        return response

    def _in_progress(self, holder: Holder, prompt: Prompt) -> AbstractContextManager[PromptInProgress | None]:
        """The prompt for a reader that follows it; None if the engine does not tell of its progress."""
        if self._engine.progress is None or holder.destination is not None:
            return nullcontext()
        return self._prompts.computing(holder.request_id, prompt.num_tokens, holder.certificates)

    async def _computed(
        self, destination: bytes | None, prompt: Prompt, sampling: Sampling, progress: PromptInProgress | None
    ) -> HeldKv:
        if progress is not None and self._engine.progress is not None:
            return await self._engine.progress.prefill_reporting(prompt, sampling, progress)
        if destination is None:
            return await self._engine.prefill(prompt, sampling)
        transfer = self._engine.kv_transfer
        if not isinstance(transfer, AllocatesFirst):
            raise Unsupported(f"destination: the {self._engine.facts.engine} engine sends KV when a decode asks for it")
        return await transfer.prefill_into(prompt, sampling, destination)

    def _hold(self, holder: Holder, kv: HeldKv, progress: PromptInProgress | None) -> Lease:
        if progress is not None:
            return progress.hold(kv)
        return self._leases.hold(holder.request_id, kv, self._layout_digest, holder.certificates)

    async def _inject_after_prefill(self, kv: HeldKv, call: RunningCall) -> None:
        async with AsyncExitStack() as undo:
            undo.push_async_callback(kv.release)
            await call.faults.inject("prefill")
            undo.pop_all()

    async def _inject_while_held(self, lease: Lease, call: RunningCall) -> None:
        with ExitStack() as undo:
            undo.callback(self._leases.discard, lease.handoff_id)
            if call.faults.has("corrupt", "held"):
                corrupt(self._engine.memory, lease.held.block_ids)
            await call.faults.inject("held")
            if not call.faults.has("drop", "held"):
                undo.pop_all()


@asynccontextmanager
async def open_service(parts: WorkerParts) -> AsyncIterator[Service]:
    """Opens the role on a worker; one without it answers RoleMismatch."""
    worker, engine = parts.worker, parts.worker.engine
    prefiller = None
    if engine is not None:
        prefiller = Prefiller(engine, worker.identity, worker.leases, parts.prompts, parts.borrower)
    servicer = PrefillServicer(parts.calls, parts.media, prefiller)
    yield Service(SERVICE_NAME, prefill_pb2_grpc.add_PrefillServiceServicer_to_server, servicer)


def _holder(request: prefill_pb2.PrefillRequest) -> Holder:
    """With certificates, only the caller and the reader that it names may read the KV."""
    destination = request.destination.engine_state if request.HasField("destination") else None
    require_names(reader=request.reader)
    if not certificate():
        return Holder(request.request_id, destination=destination)
    return Holder(request.request_id, frozenset({certificate(), request.reader} - {""}), destination)


def _response(owner: HandoffOwner, prefilled: Prefilled) -> prefill_pb2.PrefillResponse:
    kv = prefilled.kv
    handoff = _handoff(owner, prefilled)
    handoff.first_token.CopyFrom(_first_token(kv))
    retained = kv.retained if isinstance(kv, RetainedPrompt) else None
    set_usage(handoff.usage, len(prefilled.prompt.token_ids), kv.cached_tokens, retained)
    set_tiers(handoff.usage, prefilled.from_tiers)
    timings = stage_timings(prefilled.timings, owner.identity.worker_id)
    return prefill_pb2.PrefillResponse(handoff=handoff, timings=timings)


def _handoff(owner: HandoffOwner, prefilled: Prefilled) -> handoff_pb2.KvHandoff:
    message, kv = owner.handoff(prefilled.lease, prefilled.prompt.lora), prefilled.kv
    if prefilled.lease:
        message.prefix_hash = kv.prefix_hash
        message.engine_state = kv.engine_state if isinstance(kv, EngineHeldKv) else b""
    return message


def _first_token(kv: HeldKv) -> handoff_pb2.FirstToken:
    return handoff_pb2.FirstToken(
        token_id=kv.first_token,
        logprob=logprob_message(kv.logprob) if kv.logprob else None,
        prompt_logprobs=prompt_logprobs_message(kv.prompt_logprobs) if isinstance(kv, ReportedPrompt) else None,
        finish_reason=FINISH_REASONS[kv.finish_reason] if kv.finish_reason else sampling_pb2.FINISH_REASON_UNSPECIFIED,
    )
