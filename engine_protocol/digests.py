"""Digests by which workers know tenants and sessions, whose names stay with the routers."""

from hashlib import blake2b


def tenant_digest(tenant: str) -> bytes:
    """A tenant's name on workers."""
    return _digest(tenant)


def session_digest(tenant: str, session: str) -> bytes:
    """A session's name on workers: the same key of another tenant has another one."""
    return _digest(tenant, session)


def _digest(*texts: str) -> bytes:
    joined = b"".join(blake2b(text.encode("utf-8", "replace"), digest_size=16).digest() for text in texts)
    return blake2b(joined, digest_size=16).digest()
