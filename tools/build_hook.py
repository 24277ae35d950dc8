"""Has the stubs in every wheel: hatchling runs this before it packs one, as `pip install .` does in a fresh clone."""

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).resolve().parent))

import stubs

# As the extra `dev` has them.
GENERATORS = ["grpcio-tools==1.81.1", "mypy-protobuf>=3.7"]


class StubsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Generates them if they are missing, or older than their protos. An editable installation has `make protos`."""

    def dependencies(self) -> list[str]:
        return [] if stubs.are_current() else GENERATORS

    def initialize(self, version: str, _: dict[str, Any]) -> None:
        if version != "editable" and not stubs.are_current():
            stubs.main()
