"""The SGLang engine: its decode side allocates first, and its prefill side sends into the room that it is told."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from typing_extensions import Self

from baton.errors import EngineFailed, HandoffLost, InvalidRequest, Overloaded, Unsupported
from runtime.aio import timeout
from services.engines.answer import Finished, FinishReason, Tokens
from services.engines.base import EngineLoad, ModelFacts
from services.engines.external.engine import CANARY_SALT, ExternalEngine
from services.engines.external.event_reader import EventReader, event_sockets
from services.engines.external.held_kv import ExternalPrefill, HeldHandoffs
from services.engines.external.package import kv_dtype, kv_layout, read_model
from services.engines.external.requests import RequestLimits, RunningStream
from services.engines.kv import KvLayout
from services.engines.kv_transfer import RemoteKv
from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.model.checkpoint import end_ids, fingerprint, model_files
from services.engines.running.generation import Generation
from services.engines.sglang.config import SglangArguments, SglangConfig
from services.engines.sglang.inside.scheduler import LOCAL
from services.engines.sglang.kv_events import sglang_format
from services.engines.sglang.loading import ResolvedSglang, SglangStart, StartedSglang, end, side, start
from services.engines.sglang.metrics import sglang_families
from services.engines.sglang.package import SglangPackage
from services.engines.sglang.requests import (
    SglangGeneration,
    SglangRequest,
    SglangRequests,
    finished,
    reason_of,
)
from services.engines.sglang.rooms import SentKv, SglangDestination, read_room, write_room
from services.engines.sglang.sampling import check_sampling, sampling_params, unsupported_options

_FIRST_STEP_SECONDS = 300.0
_LOOK_SECONDS = 0.2
# SGLang's host of a room in which nothing is sent.
_FAKE_HOST = "2.2.2.2"


class SglangEngine(ExternalEngine):
    """An AllocatesFirst of one role, or an engine of whole requests. See docs/sglang.md for its limits."""

    _title = "SGLang"
    _requests: SglangRequests

    def __init__(
        self, config: SglangConfig, effective: ResolvedSglang, package: SglangPackage, roles: Sequence[str]
    ) -> None:
        self._config = config
        self._effective = effective
        self._args = effective.value
        self._package = package
        self._roles = tuple(roles)
        self._side = side(config, roles)
        self._rooms: set[SglangDestination] = set()
        self._reader: EventReader | None = None

    async def __aenter__(self) -> Self:
        facts = sglang_facts(self._config, self._args, self._package)
        began = time.monotonic()
        async with AsyncExitStack() as stack:
            wants_events = self._config.kv_events and self._side != "decode" and not self._args.disable_radix_cache
            sockets = stack.enter_context(event_sockets(1)) if wants_events else None
            starting = SglangStart(self._roles, facts.max_context_tokens, sockets)
            loading = asyncio.to_thread(start, self._config, self._effective, self._package, starting)
            started = await self._loaded(loading, self._config.start_seconds)
            self._llm = started.llm
            stack.push_async_callback(end, started)
            self._facts = replace(facts, load_seconds=time.monotonic() - began)
            self._prepare(started, stack)
            await self._follow(started, stack)
            async with timeout(_FIRST_STEP_SECONDS):
                await self._warm_up()
            if sockets is not None and started.has_prefix_cache:
                events = EventReader(sockets, 1, sglang_format(facts.layout.block_tokens))
                self._reader = await stack.enter_async_context(events)
            await self._open_canary(stack, self._config.canary_seconds, self._config.canary_patience_seconds)
            if started.metrics_folder:
                stack.enter_context(sglang_families(started.metrics_folder))
            self._open = stack.pop_all()
        return self

    def _prepare(self, started: StartedSglang, stack: AsyncExitStack) -> None:
        size = self._facts.layout.block_tokens
        self._blocks = started.pool_tokens // size
        self._held = HeldHandoffs(self._config.handoff.seconds, size)
        most = self._args.max_running_requests + self._config.max_waiting
        limits = RequestLimits(most, size, self._config.slow_reader_seconds, self._config.abort_seconds)
        self._requests = SglangRequests(self._llm, self._package, limits)
        stack.push_async_callback(self._requests.close)

    async def _follow(self, started: StartedSglang, stack: AsyncExitStack) -> None:
        """Reads SGLang's output, without the signal handlers that it installs where it does so itself."""
        manager = self._llm.tokenizer_manager
        manager.event_loop = asyncio.get_running_loop()
        for running in (manager.handle_loop(), self._watch(started)):
            task = asyncio.create_task(running)
            task.add_done_callback(self._stopped)
            stack.push_async_callback(_cancelled, task)

    async def _watch(self, started: StartedSglang) -> None:
        while all(each.is_alive() for each in started.processes):  # noqa: ASYNC110 - processes set no event
            await asyncio.sleep(_LOOK_SECONDS)
        codes = [each.exitcode for each in started.processes]
        raise EngineFailed(f"a process of SGLang has ended: exit codes {codes}")

    def _stopped(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._requests.fail(error)

    @property
    def healthy(self) -> bool:
        """By its processes and by its progress, since a scheduler that hangs says nothing."""
        return self._requests.failure is None and not self._canary.is_overdue

    @property
    def fetch_seconds(self) -> float:
        """The KV has been sent when a prefill ends: nothing has to stay. See TransfersKv."""
        return 0.0

    @property
    def kv_events(self) -> EventReader | None:
        """The events of its prefix cache, which a decode engine of handoffs does not have."""
        return self._reader

    def load(self) -> EngineLoad:
        """Returns requests and KV by our own count: SGLang's own comes later."""
        here, most = len(self._requests), self._args.max_running_requests
        waiting = max(0, here - most)
        used = min(self._blocks, self._requests.blocks)
        held = min(used, sum(each.blocks for each in self._rooms))
        return EngineLoad(here - waiting, waiting, 0, self._blocks, used, held)

    async def allocate(self, prompt: Prompt, sampling: Sampling, prefill_address: str) -> SglangDestination:
        """Opens a room at the prefill worker's bootstrap server, and lets SGLang allocate for it. See AllocatesFirst.

        SGLang does not say when it has, and waits for room in its pool: so that is counted here.
        """
        self._require("decode")
        self._check(prompt, sampling)
        size = self._facts.layout.block_tokens
        blocks, reserved = -(-prompt.num_tokens // size), self._args.num_reserved_decode_tokens
        free = (self._blocks - self._requests.blocks) * size - len(self._requests) * reserved
        if blocks * size + reserved > free:
            raise Overloaded("there is no room for the prompt in the pool", retry_after_seconds=1.0)
        number = 1 + secrets.randbelow(1 << 62)
        host = prefill_address.rpartition(":")[0].strip("[]")
        generation = self._submit(prompt, sampling, self._budget(prompt, sampling), _room(host, self._port, number))
        room = SglangDestination(number, generation, self._drop, blocks)
        self._rooms = {each for each in self._rooms if each.blocks} | {room}
        return room

    async def prefill_into(self, prompt: Prompt, sampling: Sampling, destination: bytes) -> SentKv:
        """Computes the prompt and one id, and returns when the KV has been sent. See AllocatesFirst."""
        self._require("prefill")
        self._check(prompt, sampling)
        number = read_room(destination, "destination.engine_state")
        began = time.monotonic()
        generation = self._submit(prompt, sampling, 1, _room(self._config.handoff.host, self._port, number))
        try:
            await generation.ending()
            token, logprob = generation.only()
        except EngineFailed as error:
            if self._requests.failure is not None:
                raise
            raise HandoffLost(f"the KV was not sent: {error.message}") from error
        finally:
            await self._drop(generation)
        reason = reason_of(token, sampling, self._facts)
        if reason is None and self._budget(prompt, sampling) <= 1:
            reason = FinishReason.LENGTH
        return SentKv(
            ExternalPrefill(
                first_token=token,
                logprob=logprob,
                finish_reason=reason,
                num_tokens=prompt.num_tokens,
                cached_tokens=min(generation.cached_tokens, prompt.num_tokens),
                compute_seconds=time.monotonic() - began,
                engine_state=b"" if reason else write_room(number),
            )
        )

    async def decode_remote(self, source: RemoteKv, sampling: Sampling) -> Generation:
        """Returns when the KV is there, and SGLang's first token is the prefill's. See TransfersKv."""
        room = source.destination
        if not isinstance(room, SglangDestination):
            raise InvalidRequest.of("destination_id", "is empty: this engine allocates first")
        generation = room.use()
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._drop, generation)
            if source.state != room.engine_state:
                raise InvalidRequest.of("handoff.engine_state", "is of another room")
            context = source.prompt.context
            length = len(generation.request.prompt)
            if context[:length] != generation.request.prompt or length >= len(context):
                raise HandoffLost("the blocks were allocated for another prompt")
            await self._arrived(generation.first_ids(context[length:]), self._config.handoff.fetch_seconds)
            undo.pop_all()
        finish = partial(finished, generation, source.prompt, sampling, self._facts)
        return RunningStream(self._events(generation, finish), partial(self._drop, generation), generation, finish)

    async def _whole(self, prompt: Prompt, sampling: Sampling) -> AsyncGenerator[Tokens | Finished, None]:
        if self._side == "prefill":
            raise Unsupported("the sglang engine of a prefill worker generates no answers")
        self._check(prompt, sampling)
        if (budget := self._budget(prompt, sampling)) < 1:
            yield Finished(FinishReason.LENGTH, len(prompt.token_ids))
            return
        local = _room(LOCAL, self._port, 0) if self._side == "decode" else {}
        generation = self._submit(prompt, sampling, budget, local)
        try:
            async for event in self._events(generation, partial(finished, generation, prompt, sampling, self._facts)):
                yield event
        finally:
            await self._drop(generation)

    def _submit(self, prompt: Prompt, sampling: Sampling, max_tokens: int, room: dict[str, Any]) -> SglangGeneration:
        arguments = {"sampling_params": sampling_params(sampling, max_tokens, self._facts.eos_token_ids), **room}
        if prompt.cache_salt:
            arguments["extra_key"] = prompt.cache_salt
        return self._requests.submit(SglangRequest(prompt.context, arguments, sampling.logprobs))

    def _budget(self, prompt: Prompt, sampling: Sampling) -> int:
        """The ids that SGLang may generate behind those that were emitted."""
        return min(sampling.max_tokens - len(prompt.emitted), self._facts.max_context_tokens - prompt.num_tokens)

    def _check(self, prompt: Prompt, sampling: Sampling) -> None:
        """Raises InvalidRequest for a prompt or options that SGLang would change, or that would end its scheduler."""
        check_sampling(sampling, self._facts.unsupported_sampling)
        tokens, pool = prompt.num_tokens, self._blocks * self._facts.layout.block_tokens
        if not prompt.token_ids:
            raise InvalidRequest.of("prompt", "is empty")
        if tokens >= self._facts.max_context_tokens:
            raise InvalidRequest.of("prompt", f"{tokens} tokens leave no room in {self._facts.max_context_tokens}")
        if tokens + self._facts.layout.block_tokens + self._args.num_reserved_decode_tokens > pool:
            raise InvalidRequest.of("prompt", f"{tokens} tokens do not fit the pool of {pool}")
        if outside := next((each for each in prompt.context if not 0 <= each < self._facts.vocab_size), None):
            raise InvalidRequest.of("prompt", f"id {outside} is not within the vocabulary of {self._facts.vocab_size}")
        if prompt.lora is not None:
            raise Unsupported("the sglang engine has no adapters")
        if prompt.media:
            raise Unsupported("the sglang engine does not accept images")

    def _require(self, role: str) -> None:
        if self._side != role:
            raise Unsupported(f"this sglang engine has not the role {role} of a handoff")

    @property
    def _port(self) -> int:
        return self._config.handoff.port

    async def _drop(self, generation: SglangGeneration) -> None:
        """Aborts a generation, and returns when SGLang has ended it."""
        if not generation.has_ended:
            self._give_back(generation)
        await self._requests.drop(generation)

    def _quiet_seconds(self) -> float:
        return self._requests.quiet_seconds

    async def _warm_up(self) -> None:
        """Generates one token, before the engine is ready and as its canary, with a salt that no client has."""
        prompt = Prompt((0,), cache_salt=CANARY_SALT)
        sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
        if self._side != "prefill":
            async for _ in self._whole(prompt, sampling):
                pass
            return
        nowhere = _room(_FAKE_HOST, self._port, 1 + secrets.randbelow(1 << 62))
        generation = self._submit(prompt, sampling, 1, nowhere)
        try:
            await generation.ending()
        finally:
            await self._drop(generation)


def _room(host: str, port: int, number: int) -> dict[str, Any]:
    return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": number}


async def _cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait([task])


def sglang_facts(config: SglangConfig, args: SglangArguments, package: SglangPackage) -> ModelFacts:
    """The facts except for the time of loading. Raises ConfigError for a folder that is not a checkpoint."""
    _, model = read_model(config.model)
    return ModelFacts(
        name=config.name or config.model.name,
        engine="sglang",
        max_context_tokens=args.context_length or int(model["max_position_embeddings"]),
        vocab_size=int(model["vocab_size"]),
        max_logprobs=config.max_logprobs,
        eos_token_ids=end_ids(config.model, model),
        layout=_layout(config, model, args, package),
        files=model_files(config.model),
        takes_handoffs=not config.whole_requests,
        unsupported_sampling=unsupported_options(args),
        settings=(
            ("chunked_prefill_size", str(args.chunked_prefill_size)),
            ("enable_deterministic_inference", str(args.enable_deterministic_inference).lower()),
            ("max_running_requests", str(args.max_running_requests)),
            ("trust_remote_code", str(args.trust_remote_code).lower()),
        ),
    )


def _layout(config: SglangConfig, model: dict[str, Any], args: SglangArguments, package: SglangPackage) -> KvLayout:
    identity = {
        "sglang": str(package.version),
        "weights": fingerprint(config.model),
        "quantization": args.quantization,
        "tp": args.tp_size,
    }
    return kv_layout(identity, model, kv_dtype(args.kv_cache_dtype, args.dtype, model), args.page_size)
