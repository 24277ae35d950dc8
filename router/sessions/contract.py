"""CacheOptions: their checks, and as workers get them. Sessions and tenants are digests there."""

from hashlib import blake2b

from google.protobuf.duration_pb2 import Duration

from baton.engine.v1 import prompt_pb2
from baton.inference.v1 import generate_pb2
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
) -> prompt_pb2.PromptCache | None:
    """The options of a validated request as workers get them; None if it has no session and asks for nothing.

    `retain_tokens` are to be retained, 0 for the whole prompt, for `most_seconds` at most.
    """
    cache, session = request.cache, request.routing.session_key
    if not (session or request.HasField("cache")):
        return None
    made = prompt_pb2.PromptCache(tenant=_digest(tenant), ends_session=cache.ends_session)
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


def session_digest(tenant: str, session: str) -> bytes:
    """A session's name on workers: the same key of another tenant has another one."""
    return _digest(tenant, session)


def _digest(*texts: str) -> bytes:
    joined = b"".join(blake2b(text.encode("utf-8", "replace"), digest_size=16).digest() for text in texts)
    return blake2b(joined, digest_size=16).digest()


def _seconds(duration: Duration) -> float:
    """Negative for what is no duration, or beyond all use."""
    is_one = duration.seconds >= 0 <= duration.nanos < 1_000_000_000 and duration.seconds <= _MOST_SECONDS
    return duration.seconds + duration.nanos / 1e9 if is_one else -1.0
