"""The control service of every worker, whatever its roles: model, load, abort, drain, KV events."""

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any

from baton.engine.v1 import worker_pb2, worker_pb2_grpc
from baton.errors import Unsupported
from baton.inference.v1 import cluster_service_pb2, media_pb2, model_pb2, timing_pb2
from runtime.clock import monotonic
from services.engines.base import EngineLoad, MemoryTiers, ModelFacts
from services.engines.kv_events import KvChange, KvChanged, KvRemoved, KvSnapshot, KvStored, in_pieces
from services.engines.rules import ImageRules
from services.handoff.leases import LeaseTable
from services.handoff.service import layout_message
from services.keeping import Upgrader
from services.moving.roles import RoleChanger
from services.moving.running import Shedding
from services.requests.calls import Calls, aborted
from services.requests.loras import inventory_message, loras_of
from services.resume.streams import KeptStreams, KeptUsage
from services.roles.diffuse import image_generation
from services.telemetry.timings import as_seconds, duration
from services.worker import Drainer, poll_changes
from services.worker_engines import WorkerEngines

SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name

_MIN_INTERVAL_SECONDS = 0.01
_DEFAULT_INTERVAL_SECONDS = 0.1

# The queue of each stage: where a request is until it has blocks.
_QUEUES = {
    timing_pb2.STAGE_PREFILL_COMPUTE: timing_pb2.STAGE_PREFILL_QUEUE,
    timing_pb2.STAGE_DECODE: timing_pb2.STAGE_DECODE_QUEUE,
}


@dataclass(frozen=True, slots=True)
class Moving:
    """The parts by which a worker gives decodes away, a role, or all to its next process; and the answers it keeps."""

    shedding: Shedding
    roles: RoleChanger
    kept: KeptStreams
    upgrader: Upgrader


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """WorkerService."""

    def __init__(
        self, epoch: int, engines: WorkerEngines, aborter: "Aborter", drainer: Drainer, moving: "Moving"
    ) -> None:
        self._moving = moving
        self._epoch = epoch
        self._engines = engines
        self._aborter = aborter
        self._drainer = drainer

    async def GetModel(self, request: worker_pb2.GetModelRequest, context: Any) -> worker_pb2.GetModelResponse:
        return worker_pb2.GetModelResponse(card=_model_card(self._engines.facts))

    async def GetLoad(self, request: worker_pb2.GetLoadRequest, context: Any) -> worker_pb2.GetLoadResponse:
        return worker_pb2.GetLoadResponse(load=self._load())

    async def WatchLoad(
        self, request: worker_pb2.WatchLoadRequest, context: Any
    ) -> AsyncGenerator[worker_pb2.WatchLoadResponse, None]:
        loads_of = poll_changes(self._load, _interval_seconds(request), _repeat_seconds(request))
        async with aclosing(loads_of) as loads:
            async for load in loads:
                yield worker_pb2.WatchLoadResponse(load=load)

    async def Abort(self, request: worker_pb2.AbortRequest, context: Any) -> worker_pb2.AbortResponse:
        return _abort_response(await self._aborter.abort(request.request_id))

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: Any
    ) -> AsyncGenerator[worker_pb2.DrainResponse, None]:
        async with aclosing(self._drainer.drain(_grace_seconds(request))) as stages:
            async for progress in stages:
                yield worker_pb2.DrainResponse(**asdict(progress), drained=progress.drained)
        # The process may end once the last message has been sent, and not before.
        context.add_done_callback(self._drainer.finish)

    async def Shed(self, request: worker_pb2.ShedRequest, context: Any) -> worker_pb2.ShedResponse:
        return worker_pb2.ShedResponse(streams=self._moving.shedding.shed(request.streams))

    async def ChangeRole(
        self, request: worker_pb2.ChangeRoleRequest, context: Any
    ) -> AsyncGenerator[worker_pb2.ChangeRoleResponse, None]:
        changing = self._moving.roles.change(request.role, self._engines.engine, self._moving.shedding)
        async with aclosing(changing) as stages:
            async for progress in stages:
                yield worker_pb2.ChangeRoleResponse(**asdict(progress))

    async def Upgrade(self, request: worker_pb2.UpgradeRequest, context: Any) -> worker_pb2.UpgradeResponse:
        await self._moving.upgrader.upgrade()
        return worker_pb2.UpgradeResponse()

    def _load(self) -> cluster_service_pb2.WorkerLoad:
        load = self._engines.load()
        return _load_message(load, self._moving.shedding.wanted(load), self._moving.kept.usage)

    async def SubscribeKvEvents(
        self, request: worker_pb2.SubscribeKvEventsRequest, context: Any
    ) -> AsyncGenerator[worker_pb2.SubscribeKvEventsResponse, None]:
        events = self._engines.engine.kv_events if self._engines.engine else None
        if events is None:
            raise Unsupported(f"the {self._engines.facts.engine} engine has no events of its prefix cache")
        async with aclosing(events.kv_changes()) as changes:
            sequence = 0
            async for change in changes:
                for piece in in_pieces(change):
                    yield kv_event(self._epoch, sequence, piece)
                    sequence += 1

    async def EndSession(self, request: worker_pb2.EndSessionRequest, context: Any) -> worker_pb2.EndSessionResponse:
        engine = self._engines.engine
        released = await engine.end_session(request.session) if engine is not None else 0
        return worker_pb2.EndSessionResponse(released_blocks=released)

    async def ListLoras(self, request: worker_pb2.ListLorasRequest, context: Any) -> worker_pb2.ListLorasResponse:
        loras = loras_of(self._engines.engine)
        await loras.refresh()
        return worker_pb2.ListLorasResponse(inventory=inventory_message(loras.inventory()))

    async def WatchLoras(
        self, request: worker_pb2.WatchLorasRequest, context: Any
    ) -> AsyncGenerator[worker_pb2.WatchLorasResponse, None]:
        loras = loras_of(self._engines.engine)
        async with aclosing(poll_changes(loras.inventory, _DEFAULT_INTERVAL_SECONDS)) as inventories:
            async for inventory in inventories:
                yield worker_pb2.WatchLorasResponse(inventory=inventory_message(inventory))

    async def LoadLora(self, request: worker_pb2.LoadLoraRequest, context: Any) -> worker_pb2.LoadLoraResponse:
        loras = loras_of(self._engines.engine)
        await loras.load(request.name)
        return worker_pb2.LoadLoraResponse(inventory=inventory_message(loras.inventory()))

    async def UnloadLora(self, request: worker_pb2.UnloadLoraRequest, context: Any) -> worker_pb2.UnloadLoraResponse:
        loras = loras_of(self._engines.engine)
        await loras.unload(request.name)
        return worker_pb2.UnloadLoraResponse(inventory=inventory_message(loras.inventory()))


@dataclass(frozen=True, slots=True)
class Aborted:
    """The result of an abort: the stage that the request had reached, and the KV that was freed."""

    found: bool
    stage: "timing_pb2.Stage.ValueType"
    tokens_discarded: int
    blocks_freed: int
    seconds: float


class Aborter:
    """Stops calls and frees handoffs by the id of their request."""

    def __init__(self, calls: Calls, leases: LeaseTable) -> None:
        self._calls = calls
        self._leases = leases

    async def abort(self, request_id: str) -> Aborted:
        """Stops a request's calls and frees its handoffs; returns when its blocks are back."""
        started = monotonic()
        stage = timing_pb2.STAGE_UNSPECIFIED
        tokens = blocks = 0
        calls = self._calls.find(request_id)
        for call in calls:
            call.stop(aborted(request_id))
        for call in calls:
            await call.ended.wait()
            stage = _QUEUES.get(call.stage, call.stage) if not call.freed_kv.blocks else call.stage
            tokens += call.freed_kv.tokens
            blocks += call.freed_kv.blocks
        leases = self._leases.of(request_id)
        if leases:
            stage = stage or timing_pb2.STAGE_HANDOFF_WAIT
            tokens += sum(lease.held.num_tokens for lease in leases)
            blocks += await self._leases.release_each(leases)
        return Aborted(bool(calls or leases), stage, tokens, blocks, monotonic() - started)


def _model_card(facts: ModelFacts) -> worker_pb2.ModelCard:
    """Everything that a router needs to know about the model."""
    return worker_pb2.ModelCard(
        name=facts.name,
        limits=model_pb2.ModelLimits(
            max_context_tokens=facts.max_context_tokens,
            vocab_size=facts.vocab_size,
            max_logprobs=facts.max_logprobs,
        ),
        capabilities=_capabilities(facts),
        layout=layout_message(facts.layout),
        eos_token_ids=facts.eos_token_ids,
        tokenizer_json=facts.files.tokenizer_json,
        tokenizer_config_json=facts.files.tokenizer_config_json,
        chat_template=facts.files.chat_template,
        images=_image_rules(facts.images) if facts.images else None,
        embedding=model_pb2.EmbeddingRules(**asdict(facts.embedding)) if facts.embedding else None,
        engine_settings=dict(facts.settings),
        image_generation=image_generation(facts.drawing) if facts.drawing else None,
    )


def _capabilities(facts: ModelFacts) -> model_pb2.ModelCapabilities:
    return model_pb2.ModelCapabilities(
        chat=bool(facts.files.chat_template),
        logprobs=facts.max_logprobs > 0,
        guided_decoding=facts.guided_decoding,
        lora=facts.lora,
        modalities=[media_pb2.MODALITY_IMAGE] if facts.images else [],
        unsupported_sampling=facts.unsupported_sampling,
        embeddings_only=facts.embeddings_only,
        prompt_logprobs=facts.prompt_logprobs,
        images_only=facts.images_only,
    )


def _image_rules(rules: ImageRules) -> worker_pb2.ImageRules:
    return worker_pb2.ImageRules(
        placeholder=rules.placeholder,
        placeholder_token_id=rules.placeholder_token_id,
        tokens_per_image=rules.tokens_per_image,
        embedding_layout_digest=rules.embedding_layout.digest,
        encoder_fingerprint=rules.encoder_fingerprint,
    )


def _load_message(load: EngineLoad, shed: int, kept: KeptUsage) -> cluster_service_pb2.WorkerLoad:
    return cluster_service_pb2.WorkerLoad(
        running=load.running,
        waiting=load.waiting,
        waiting_prefill_tokens=load.waiting_prefill_tokens,
        blocks_total=load.blocks_total,
        blocks_used=load.blocks_used,
        blocks_held=load.blocks_held,
        shed=shed,
        kept_streams=kept.attached + kept.parked,
        parked_streams=kept.parked,
        wake=None if load.wake_seconds is None else duration(load.wake_seconds),
        memory=_memory_message(load.memory) if load.memory else None,
        retained=[cluster_service_pb2.RetainedBlocks(tenant=name, blocks=number) for name, number in load.retained],
    )


def _memory_message(memory: MemoryTiers) -> cluster_service_pb2.MemoryTiers:
    return cluster_service_pb2.MemoryTiers(
        host_blocks_total=memory.host_total,
        host_blocks_used=memory.host_used,
        disk_blocks_total=memory.disk_total,
        disk_blocks_used=memory.disk_used,
        prompt_tokens=memory.prompt_tokens,
        device_tokens=memory.device_tokens,
        host_tokens=memory.host_tokens,
        disk_tokens=memory.disk_tokens,
    )


def kv_event(epoch: int, sequence: int, change: KvChange) -> worker_pb2.SubscribeKvEventsResponse:
    """Converts one change, or a piece of one, to its message."""
    message = worker_pb2.SubscribeKvEventsResponse(epoch=epoch, sequence=sequence, data_parallel_rank=change.rank)
    match change:
        case KvStored():
            message.stored.CopyFrom(_stored(change))
        case KvRemoved():
            message.removed.block_hashes.extend(change.block_hashes)
        case KvChanged():
            message.changed.stored.extend(change.stored)
            message.changed.removed.extend(change.removed)
            message.changed.moved.extend(_stored(each) for each in change.moved)
            message.changed.SetInParent()
        case KvSnapshot():
            message.snapshot.block_hashes.extend(change.block_hashes)
            # Set even if empty: an empty snapshot says that nothing is known.
            message.snapshot.SetInParent()
    return message


def _stored(change: KvStored) -> worker_pb2.KvBlocksStored:
    return worker_pb2.KvBlocksStored(
        block_hashes=change.block_hashes, tier=worker_pb2.KvTier.ValueType(change.tier.value)
    )


def _interval_seconds(request: worker_pb2.WatchLoadRequest) -> float:
    if not request.HasField("interval"):
        return _DEFAULT_INTERVAL_SECONDS
    return max(_MIN_INTERVAL_SECONDS, as_seconds(request.interval))


def _repeat_seconds(request: worker_pb2.WatchLoadRequest) -> float:
    return as_seconds(request.repeat_after) if request.HasField("repeat_after") else math.inf


def _grace_seconds(request: worker_pb2.DrainRequest) -> float | None:
    return max(0.0, as_seconds(request.grace)) if request.HasField("grace") else None


def _abort_response(aborted: Aborted) -> worker_pb2.AbortResponse:
    return worker_pb2.AbortResponse(
        found=aborted.found,
        stage=aborted.stage,
        tokens_discarded=aborted.tokens_discarded,
        blocks_freed=aborted.blocks_freed,
        milliseconds=aborted.seconds * 1000,
    )
