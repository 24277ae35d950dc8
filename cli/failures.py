"""Formats errors for a terminal, in one line, and chooses the exit code."""

from baton.errors import BatonError, ConfigError, InvalidRequest, ModelNotFound, NoWorker, Unavailable, Unsupported

BAD_REQUEST = (InvalidRequest, Unsupported, ModelNotFound, ConfigError)


def exit_code(error: BatonError) -> int:
    """2 if the request has to be fixed, 1 for everything else."""
    return 2 if isinstance(error, BAD_REQUEST) else 1


def describe(error: BatonError, address: str | None = None) -> str:
    """Reason, message, stage, worker and retry delay; if the router cannot be reached, also what to do."""
    parts = [f"error: {error.reason}: {error.message}"]
    where = " on ".join(part for part in (error.stage, error.worker_id) if part)
    if where:
        parts.append(f"(at {where})")
    retry = getattr(error, "retry_after_seconds", None)
    if retry is not None:
        parts.append(f"(retry in {retry:g} s)")
    if address is not None and _is_unreachable(error):
        parts.append(f"- no response from {address}: `baton up` starts a cluster, `baton doctor` looks for causes")
    return " ".join(parts)


def _is_unreachable(error: BatonError) -> bool:
    # An error that a router sent names a stage or a worker.
    return (
        isinstance(error, Unavailable) and not isinstance(error, NoWorker) and not error.stage and not error.worker_id
    )
