"""On whose account a request runs, and how urgent it is: read from its metadata, and passed on to its workers."""

from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass

from rpc.caller import Caller, current_caller
from rpc.errors import InvalidRequest
from rpc.metadata import PRIORITY_KEY, TENANT_KEY

_MOST_URGENT = 10
_LONGEST_TENANT = 128

Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class Standing:
    """`tenant` is empty where nobody said who it is; of two priorities the higher goes first."""

    tenant: str = ""
    priority: int = 0


_NONE = Standing()
_CURRENT: ContextVar[Standing] = ContextVar("standing", default=_NONE)


def current_standing() -> Standing:
    """Of the request that this task answers."""
    return _CURRENT.get()


def take_standing(metadata: Metadata | None, proxies: frozenset[str] = frozenset()) -> None:
    """Notes the standing of the call that this task answers.

    A caller that has proven its name is its own tenant, unless it is one of the `proxies`, which name theirs. Raises
    InvalidRequest naming the key that is wrong.
    """
    tenant = priority = ""
    for key, value in metadata or ():
        if key == TENANT_KEY:
            tenant = str(value)
        elif key == PRIORITY_KEY:
            priority = str(value)
    standing = Standing(_tenant(tenant, current_caller(), proxies), _priority(priority))
    _CURRENT.set(standing)


def standing_metadata() -> tuple[tuple[str, str], ...]:
    """What a call to a worker carries of it."""
    standing = _CURRENT.get()
    if standing == _NONE:
        return ()
    return ((TENANT_KEY, standing.tenant), (PRIORITY_KEY, str(standing.priority)))


def _tenant(named: str, caller: Caller | None, proxies: frozenset[str]) -> str:
    if caller is not None and caller.name not in proxies:
        return caller.name
    if len(named) > _LONGEST_TENANT or not named.isprintable():
        raise InvalidRequest.of(TENANT_KEY, f"must be at most {_LONGEST_TENANT} printable characters")
    return named or (caller.name if caller else "")


def _priority(text: str) -> int:
    if not text:
        return 0
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 2) or int(digits) > _MOST_URGENT:
        raise InvalidRequest.of(PRIORITY_KEY, f"must be a whole number from -{_MOST_URGENT} to {_MOST_URGENT}")
    return int(text)
