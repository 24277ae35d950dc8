"""How slow the stand-in is, and when it breaks: set by tests that start it in a process of its own."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "FAKE_TENSORRT_LLM"


@dataclass(frozen=True, slots=True)
class Knobs:
    """`fabric` is a folder by which processes fetch each other's KV."""

    version: str = "1.4.0rc1"
    step_seconds: float = 0.0005
    prompt_seconds: float = 0.0  # of a thousand tokens
    fetch_seconds: float = 0.0
    fabric: str = ""
    crash_after_tokens: int = 0  # of all requests together
    freeze_after_tokens: int = 0

    def to_environment(self) -> dict[str, str]:
        """What a process is to be started with."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {VARIABLE: json.dumps(fields), "PYTHONPATH": str(Path(__file__).parents[1])}


def knobs() -> Knobs:
    """Those of this process."""
    return Knobs(**json.loads(os.environ.get(VARIABLE, "{}")))
