"""Errors as a person at a terminal reads them: one line, and an exit code."""

from rpc.errors import BatonError, ConfigError, InvalidRequest, ModelNotFound, NoWorker, Unavailable, Unsupported

BAD_REQUEST = (InvalidRequest, Unsupported, ModelNotFound, ConfigError)


def exit_code(error: BatonError) -> int:
    """2 if the request has to be mended, 1 for everything else."""
    return 2 if isinstance(error, BAD_REQUEST) else 1


def describe(error: BatonError, address: str | None = None) -> str:
    """Reason, message, where it happened, and when to try again; for a router that is not there, also what to do."""
    parts = [f"error: {error.reason}: {error.message}"]
    where = " on ".join(part for part in (error.stage, error.worker_id) if part)
    if where:
        parts.append(f"(at {where})")
    retry = getattr(error, "retry_after_seconds", None)
    if retry is not None:
        parts.append(f"(try again in {retry:g} s)")
    if address is not None and _nobody_answers(error):
        parts.append(f"- nothing answers at {address}: `baton up` starts a cluster, `baton doctor` looks for causes")
    return " ".join(parts)


def _nobody_answers(error: BatonError) -> bool:
    # Whoever answers says at which stage or which worker was missing.
    return (
        isinstance(error, Unavailable) and not isinstance(error, NoWorker) and not error.stage and not error.worker_id
    )
