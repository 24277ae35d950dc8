"""Every Compose topology, from its start to its end."""

import pytest

from tools.containers import compose
from tools.containers.engine import Engine
from tools.containers.project import FILES


@pytest.mark.parametrize("mode", FILES)
def test_a_topology_scales_under_load_and_leaves_nothing_behind(engine: Engine, mode: str) -> None:
    compose.run(engine, mode)
