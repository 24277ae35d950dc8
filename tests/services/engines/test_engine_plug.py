"""Engines are chosen by kind; an engine of another distribution works like the built-in ones."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
from support.clients.worker_calls import calls_to, decode_request

from baton.errors import ConfigError
from discovery.memory import MemoryRegistry
from runtime.config import load
from services.config import WorkerConfig
from services.engines import registry
from services.server import host_worker

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "extending"


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example can be imported, as a module that is installed."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    sys.modules.pop("echo_engine", None)


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The metadata of a distribution that brings the engine: a group, a name, and an object."""
    found = EntryPoints(
        [
            EntryPoint("echo", "echo_engine:KIND", registry.ENTRY_POINTS),
            EntryPoint("broken", "no.such.module:KIND", registry.ENTRY_POINTS),
            EntryPoint("wrong", "echo_engine:EchoEngine", registry.ENTRY_POINTS),
        ]
    )
    monkeypatch.setattr(registry, "entry_points", lambda group: found.select(group=group))


def _load(*overrides: str) -> WorkerConfig:
    return load(WorkerConfig, "deploy/config/decode.yaml", overrides).value


@pytest.mark.usefixtures("echo")
async def test_an_engine_from_outside_serves_a_whole_request() -> None:
    config = _load("engine={kind: echo, name: parrot}", "listen=127.0.0.1:0", "roles=[decode]")
    async with host_worker(config, MemoryRegistry("test")) as worker, calls_to(worker.address) as calls:
        request = decode_request()
        request.model = "parrot"
        decoded = await calls.decode(request)
    assert decoded.token_ids == list(request.prompt.token_ids)[:20]


@pytest.mark.usefixtures("echo")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "engine={kind: dynamo}",
            "engine: unknown engine 'dynamo'; expected one of broken, diffusers, echo, pytorch, sglang",
        ),
        ("engine={kind: broken}", "engine: engine 'broken' cannot be loaded: No module named 'no'"),
        ("engine={kind: wrong}", "engine: engine 'wrong': echo_engine:EchoEngine is not an EngineKind"),
        ("engine={kind: echo, nam: parrot}", "engine.nam: unknown key (did you mean 'name'?)"),
        ("engine={kind: simulated, num_blocks: 0}", "engine.num_blocks: Input should be greater than or equal to 1"),
        ("engine={name: parrot}", "engine: expected the key kind, and the keys of that engine"),
    ],
)
def test_a_wrong_engine_is_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        _load(override)
    assert message in refused.value.message


@pytest.mark.usefixtures("echo")
async def test_an_engine_without_an_encoder_refuses_the_role() -> None:
    config = _load("engine={kind: echo}", "listen=127.0.0.1:0", "roles=[encode]")
    with pytest.raises(ConfigError, match="roles: the echo engine has no encoder"):
        async with host_worker(config, MemoryRegistry("test")):
            pass


def test_a_worker_with_another_engine_starts_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; import services.__main__"
    started = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert started.returncode == 0, started.stderr[-2000:]
