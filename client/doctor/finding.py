"""What a check found out: that something is well, or what is wrong and what to do about it."""

import enum
from dataclasses import dataclass


class Severity(enum.Enum):
    """How bad it is: `BROKEN` is what stops Baton from working."""

    WELL = "ok"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence on what was found, and, unless all is well, one on what to do."""

    severity: Severity
    found: str
    remedy: str = ""


def well(found: str) -> Finding:
    """Nothing to do."""
    return Finding(Severity.WELL, found)


def warning(found: str, remedy: str) -> Finding:
    """It works, and will not always."""
    return Finding(Severity.WARNING, found, remedy)


def broken(found: str, remedy: str) -> Finding:
    """It cannot work."""
    return Finding(Severity.BROKEN, found, remedy)
