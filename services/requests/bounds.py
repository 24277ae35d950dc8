"""Bounds of the names and digests that callers of a worker send: it keeps some of them after the call."""

from hashlib import sha256

from baton.engine.v1 import decode_pb2, prompt_pb2
from rpc.violations import Violations

_LONGEST_NAME = 1024  # an id, an address, the URI of a certificate
_LONGEST_DIGEST = 64
_LONGEST_READERS = 2**20  # the names of all readers of one lease
_LONGEST_RECORD = 2**18  # of a kept answer; routers keep none whose request takes more than 16 KiB of it
_SHA256_BYTES = sha256().digest_size


def are_short(*names: str) -> bool:
    """True if none of these names is too long."""
    return max(map(len, names)) <= _LONGEST_NAME


def require_names(**names: str) -> None:
    """Raises InvalidRequest naming each of these fields that is too long; `__` stands for the dot of a path."""
    if are_short(*names.values()):
        return
    violations = Violations()
    for field, name in names.items():
        violations.count(field.replace("__", "."), len(name), _LONGEST_NAME)
    violations.raise_any()


def require_readers(request: decode_pb2.YieldRequest | decode_pb2.LendBlocksRequest) -> None:
    """Raises InvalidRequest if the readers' names are too long together."""
    violations = Violations()
    violations.count("readers", sum(map(len, request.readers)), _LONGEST_READERS)
    violations.raise_any()


def require_cache_keys(cache: prompt_pb2.PromptCache) -> None:
    """Raises InvalidRequest naming each key of a prefix cache's that is too long."""
    violations = Violations()
    for field in ("tenant", "session", "parent_session"):
        violations.count(f"prompt.cache.{field}", len(getattr(cache, field)), _LONGEST_DIGEST)
    violations.raise_any()


def require_digests(field: str, answer: decode_pb2.StreamKeep | decode_pb2.CancelledAnswer) -> None:
    """Raises InvalidRequest, with paths below `field`, unless an answer's digests are of SHA-256."""
    violations = Violations()
    for name in ("secret_sha256", "owner_sha256"):
        found = len(getattr(answer, name))
        violations.require(found == _SHA256_BYTES, f"{field}.{name}", f"has {found} bytes instead of {_SHA256_BYTES}")
    violations.raise_any()


def require_keep(keep: decode_pb2.StreamKeep) -> None:
    """Raises InvalidRequest naming what a worker cannot keep of an answer."""
    require_digests("keep", keep)
    violations = Violations()
    violations.count("keep.record", len(keep.record), _LONGEST_RECORD)
    violations.raise_any()
