"""The stand-in's slowness and breakage: set by tests that start it in a process of its own."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "FAKE_TENSORRT_LLM"


@dataclass(frozen=True, slots=True)
class Knobs:
    """`fabric` is a folder by which processes fetch each other's KV."""

    version: str = "1.3.0rc30"
    step_seconds: float = 0.0005
    prompt_seconds: float = 0.0  # of a thousand tokens
    fetch_seconds: float = 0.0
    fabric: str = ""
    crash_after_tokens: int = 0  # of all requests together
    freeze_after_tokens: int = 0
    noise_by_row: bool = True  # as upstream; else a seed is reproducible in every row of a batch

    def to_environment(self) -> dict[str, str]:
        """The arguments that a process starts with."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        path = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {VARIABLE: json.dumps(fields), "PYTHONPATH": os.pathsep.join(path)}


def knobs() -> Knobs:
    """Those of this process."""
    return Knobs(**json.loads(os.environ.get(VARIABLE, "{}")))
