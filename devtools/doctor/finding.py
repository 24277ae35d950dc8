"""The finding of a check: something is well, or something is wrong and how to fix it."""

import enum
from dataclasses import dataclass


class Severity(enum.Enum):
    """The severity of a finding. With `BROKEN`, Baton does not work."""

    WELL = "ok"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about what was found, and a remedy unless all is well."""

    severity: Severity
    found: str
    remedy: str = ""


def well(found: str) -> Finding:
    """Nothing is wrong."""
    return Finding(Severity.WELL, found)


def warning(found: str, remedy: str) -> Finding:
    """It works, but not in all situations."""
    return Finding(Severity.WARNING, found, remedy)


def broken(found: str, remedy: str) -> Finding:
    """It does not work."""
    return Finding(Severity.BROKEN, found, remedy)
