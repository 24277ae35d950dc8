"""The contract with sessions about prefix caches: what requests say of their KV, and what becomes of it.

CacheOptions are checked here, and sent to workers with digests of sessions and tenants. EndSession goes to all workers
of a model, since any of them may have what the session leaves. Marks are places in a chat: a mark's tokens are those of
the chat's prompt that the chat up to there begins with, too. Engines decide: see
services/engines/pytorch/kv_cache/retention.py.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

import structlog
from google.protobuf.duration_pb2 import Duration

from baton.calls import unary
from baton.engine.v1 import prompt_pb2, worker_pb2
from baton.errors import BatonError, InvalidRequest
from baton.inference.v1 import generate_pb2
from engine_protocol.prefix_hash import session_digest, tenant_digest
from router.admission.quotas import Quotas
from router.telemetry.stats import RequestStats
from router.text import chat_input
from router.text.served_model import ServedModel
from router.workers.cluster import Cluster
from router.workers.handle import WorkerHandle
from rpc.violations import Violations

LONGEST_KEY = 1024  # in characters
_MOST_PRIORITY = 10
_MOST_SECONDS = 10**9


def check_cache(request: generate_pb2.GenerateRequest, violations: Violations) -> None:
    """Notes the wrong fields of CacheOptions."""
    cache, session = request.cache, request.routing.session_key
    of_sessions = {
        "ends_session": cache.ends_session,
        "parent_session": bool(cache.parent_session),
        "next_in": cache.HasField("next_in"),
    }
    for name, is_set in of_sessions.items():
        violations.require(bool(session) or not is_set, f"cache.{name}", "needs routing.session_key")
    if len(cache.parent_session) > LONGEST_KEY:
        violations.add("cache.parent_session", f"has {len(cache.parent_session)} characters of at most {LONGEST_KEY}")
    is_own = bool(session) and cache.parent_session == session
    violations.require(not is_own, "cache.parent_session", "is the session itself")
    if cache.HasField("next_in"):
        violations.require(_seconds(cache.next_in) >= 0, "cache.next_in", "must be a duration that is not negative")
    if cache.HasField("retain"):
        _check_retain(request, violations)


def _check_retain(request: generate_pb2.GenerateRequest, violations: Violations) -> None:
    retain = request.cache.retain
    violations.require(_seconds(retain.ttl) > 0, "cache.retain.ttl", "must be a positive duration")
    is_known = -_MOST_PRIORITY <= retain.priority <= _MOST_PRIORITY
    text = f"{retain.priority} is not from -{_MOST_PRIORITY} to {_MOST_PRIORITY}"
    violations.require(is_known, "cache.retain.priority", text)
    if not retain.HasField("chat"):
        return
    violations.require(not retain.prompt_tokens, "cache.retain.prompt_tokens", "cannot be combined with chat")
    turns = request.chat.messages
    has_turn = retain.chat.messages <= len(turns)
    violations.require(has_turn, "cache.retain.chat.messages", f"the chat has {len(turns)}")
    if has_turn:
        parts = len(turns[retain.chat.messages - 1].parts) if retain.chat.messages else 0
        violations.require(retain.chat.parts <= parts, "cache.retain.chat.parts", f"the message has {parts}")


def prompt_cache(
    request: generate_pb2.GenerateRequest, tenant: str, retain_tokens: int, most_seconds: float
) -> prompt_pb2.PromptCache:
    """The options of a validated request as workers get them.

    `retain_tokens` are to be retained, 0 for the whole prompt, for `most_seconds` at most.
    """
    cache, session = request.cache, request.routing.session_key
    made = prompt_pb2.PromptCache(tenant=tenant_digest(tenant), ends_session=cache.ends_session)
    if session:
        made.session = session_digest(tenant, session)
    if cache.parent_session:
        made.parent_session = session_digest(tenant, cache.parent_session)
    if cache.HasField("retain"):
        made.retain_milliseconds = max(1, round(min(_seconds(cache.retain.ttl), most_seconds) * 1000))
        made.retain_tokens, made.retain_priority = retain_tokens, cache.retain.priority
    if cache.HasField("next_in"):
        made.next_in_milliseconds = round(_seconds(cache.next_in) * 1000)
    return made


def _seconds(duration: Duration) -> float:
    """Negative for what is no duration, or beyond all use."""
    is_one = duration.seconds >= 0 <= duration.nanos < 1_000_000_000 and duration.seconds <= _MOST_SECONDS
    return duration.seconds + duration.nanos / 1e9 if is_one else -1.0


log = structlog.get_logger(__name__)

_SECONDS: Final = 2.0
_AT_ONCE: Final = 32
_MOST_BLOCKS: Final = 2**32 - 1  # that an answer can say; each worker may say as many


class SessionEnds:
    """Ends sessions. A call counts as a request of its tenant."""

    def __init__(self, cluster: Cluster, quotas: Quotas) -> None:
        self._cluster = cluster
        self._quotas = quotas

    async def end(self, request: generate_pb2.EndSessionRequest, tenant: str) -> int:
        """Ends a session of the tenant; returns how many blocks nothing else needs. Raises InvalidRequest,
        ModelNotFound and QuotaExceeded.

        A worker that does not answer keeps them: they are evicted in their turn.
        """
        if not 0 < len(request.session_key) <= LONGEST_KEY:
            raise InvalidRequest.of("session_key", f"must have 1 to {LONGEST_KEY} characters")
        model = self._cluster.model(request.model)
        async with self._quotas.track(tenant, RequestStats(request_id="")):
            ended = worker_pb2.EndSessionRequest(session=session_digest(tenant, request.session_key))
            workers = [one for one in self._cluster.workers if one.record.model == model.name and not one.problem]
            free = asyncio.Semaphore(_AT_ONCE)
            released = sum(await asyncio.gather(*(self._end(worker, ended, free) for worker in workers)))
            return min(released, _MOST_BLOCKS)

    async def _end(self, worker: WorkerHandle, ended: worker_pb2.EndSessionRequest, free: asyncio.Semaphore) -> int:
        async with free:
            try:
                with worker.keep_open():
                    answer = await unary(worker.control.EndSession(ended, timeout=_SECONDS))
            except BatonError as error:
                log.info("a session was not ended", worker_id=worker.record.worker_id, reason=error.reason)
                return 0
        return answer.released_blocks


_PIECE = 1024
_NOTHING = 1  # less than a block: 0 would be the whole prompt


def retained_tokens(
    request: generate_pb2.GenerateRequest, token_ids: Sequence[int], model: ServedModel, template_seconds: float
) -> int:
    """The number of the prompt's ids that Retention is of; 0 is all of them. Slow for long texts.

    A place within a chat is rendered a second time, up to it. The prompt is not: what both begin with is before the
    place, whatever the template does. Raises SlowTemplate as request_input.tokenize.
    """
    retain = request.cache.retain
    if not retain.HasField("chat"):
        return retain.prompt_tokens
    if _is_end(retain.chat, request.chat):
        return 0
    try:
        beginning = _beginning(retain.chat, request.chat)
        ids, _ = chat_input.encode(beginning, model, template_seconds, request.routing.cache_salt)
    except InvalidRequest:  # from a template that refuses the shorter chat, though not the whole one
        return _NOTHING
    return max(_NOTHING, _common(token_ids, ids))


def _is_end(place: generate_pb2.ChatPosition, chat: generate_pb2.ChatInput) -> bool:
    count = len(chat.messages)
    return place.messages == count and (not count or place.parts == len(chat.messages[-1].parts))


def _beginning(place: generate_pb2.ChatPosition, chat: generate_pb2.ChatInput) -> generate_pb2.ChatInput:
    """The chat up to the place. Of media only that they are there: their content may be large."""
    made = generate_pb2.ChatInput(tools=chat.tools, template_variables=chat.template_variables)
    for index, turn in enumerate(chat.messages[: place.messages], start=1):
        parts = turn.parts[: place.parts] if index == place.messages else turn.parts
        copy = made.messages.add(
            role=turn.role, tool_calls=turn.tool_calls, tool_call_id=turn.tool_call_id, name=turn.name
        )
        copy.reasoning = turn.reasoning
        for part in parts:
            if part.HasField("media"):
                copy.parts.add().media.modality = part.media.modality
            else:
                copy.parts.add(text=part.text)
    if not made.messages:
        # Templates refuse a chat without any message.
        made.messages.add(role="user").parts.add(text="")
    return made


def _common(ids: Sequence[int], others: Sequence[int]) -> int:
    """The number of ids that both begin with."""
    most = min(len(ids), len(others))
    first = 0
    while first < most and list(ids[first : first + _PIECE]) == list(others[first : first + _PIECE]):
        first += _PIECE
    end = min(first + _PIECE, most)
    return next((at for at in range(first, end) if ids[at] != others[at]), max(min(first, most), end))
