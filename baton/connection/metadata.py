"""The keys of the metadata that clients and routers exchange, and the metadata of a call."""

from baton.errors import InvalidRequest

# The tenant whose quota a request counts for, and its priority; see docs/admission.md.
TENANT_KEY = "x-baton-tenant"
PRIORITY_KEY = "x-baton-priority"

# Asks for a record of the request: docs/replay.md.
RECORD_KEY = "x-baton-record"

# Trailing metadata with a Timings message, also of failed requests.
TIMINGS_KEY = "x-baton-timings-bin"

Metadata = tuple[tuple[str, str], ...]

RECORDED: Metadata = ((RECORD_KEY, "1"),)


def header(key: str, value: str) -> Metadata:
    """One pair, or none for an empty value. Raises InvalidRequest for a value that gRPC cannot send."""
    if not value.isascii() or not value.isprintable():
        raise InvalidRequest.of(key, "must be printable ASCII, as all gRPC metadata")
    return ((key, value),) if value else ()
