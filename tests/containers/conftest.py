"""Images and a container engine for these tests, which only `make containers` runs: as root, with podman."""

from collections.abc import Iterator
from contextlib import suppress

import pytest

from tools.containers import base, images
from tools.containers.engine import CommandFailed, Engine, find_engine

TARGETS = ("router", "cpu")


@pytest.fixture(scope="session")
def engine() -> Engine:
    return find_engine()


@pytest.fixture(scope="session", autouse=True)
def built(engine: Engine) -> Iterator[None]:
    """The images `baton:router` and `baton:cpu` of this checkout, on a base from Debian's packages."""
    base.ensure(engine, base.NAME)
    before = _named(engine)
    for target in TARGETS:
        images.build(engine, target, images.Choices(base=base.NAME, torch_index="", uses_host_pip=True))
    # Those that a newer one replaced; layers of stages stay, for the next build.
    replaced = before - _named(engine)
    yield
    for image in replaced:
        # Not by force, which also removes the containers of others that still use it.
        with suppress(CommandFailed):
            engine.run("rmi", image)


def _named(engine: Engine) -> set[str]:
    return {line for target in TARGETS for line in engine.run("images", "--quiet", f"baton:{target}").split()}
