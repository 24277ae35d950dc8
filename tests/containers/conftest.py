"""Images and a container engine for these tests, which only `make containers` runs: as root, with podman."""

from collections.abc import Iterator

import pytest

from tools.containers import base, images
from tools.containers.engine import Engine, find_engine


@pytest.fixture(scope="session")
def engine() -> Engine:
    return find_engine()


@pytest.fixture(scope="session", autouse=True)
def built(engine: Engine) -> Iterator[None]:
    """The images `baton:router` and `baton:cpu` of this checkout, on a base from Debian's packages."""
    base.ensure(engine, base.NAME)
    for target in ("router", "cpu"):
        images.build(engine, target, images.Choices(base=base.NAME, torch_index="", uses_host_pip=True))
    yield
    # Layers that a newer build replaced.
    engine.run("image", "prune", "--force")
