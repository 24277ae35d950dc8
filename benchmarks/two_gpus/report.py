"""Tables in Markdown, lines of JSON, quantiles, and which GPU a process sees."""

import json
import os
import sys
from collections.abc import Sequence

import structlog

from benchmarks.gpu_transfer import TINY


def see(gpu: int) -> None:
    """Makes this process see one GPU only, as `baton up` does for workers. Before its first use of CUDA.

    With BATON_BENCHMARK_SEE_BOTH it sees the other one too, as the second.
    """
    if not TINY:
        both = os.environ.get("BATON_BENCHMARK_SEE_BOTH") == "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = f"{gpu},{1 - gpu}" if both else str(gpu)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a table; numbers get three digits."""
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(map(digits, row)) + " |")
    print(flush=True)


def say(what: str, **found: object) -> None:
    """Prints one result, with its numbers rounded."""
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in found.items()}
    print(what, json.dumps(rounded), flush=True)


def digits(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def quantile(values: Sequence[float], part: float) -> float:
    """Returns the value below which `part` of them are; nan without values."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else float("nan")


def _log_to_stderr() -> None:
    """Standard output is for the report."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))


_log_to_stderr()
