"""The images that were built, as they run."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tools.containers import base, images
from tools.containers.engine import CommandFailed, Engine

RESTRICTED = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "all", "--security-opt", "no-new-privileges")
STOP_SECONDS = 120
CHOICES = images.Choices(base=base.NAME, torch_index="", uses_host_pip=True)


def run(engine: Engine, target: str, *command: str) -> str:
    return engine.run("run", "--rm", "--network", "none", *RESTRICTED, f"baton:{target}", *command)


def inspected(engine: Engine, target: str) -> Any:
    return json.loads(engine.run("image", "inspect", f"baton:{target}"))[0]


def packages(engine: Engine, target: str) -> set[str]:
    listed = json.loads(run(engine, target, "cat", "/opt/venv/sbom.json"))
    assert listed["bomFormat"] == "CycloneDX"
    return {component["name"] for component in listed["components"]}


@pytest.mark.parametrize(("target", "megabytes"), [("router", 260), ("cpu", 1600)])
def test_an_image_is_small(engine: Engine, target: str, megabytes: int) -> None:
    assert images.size_mb(engine, f"baton:{target}") < megabytes


@pytest.mark.parametrize("target", ["router", "cpu"])
def test_a_process_is_not_root(engine: Engine, target: str) -> None:
    assert run(engine, target, "id", "-u").strip() == "10001"


@pytest.mark.parametrize("target", ["router", "cpu"])
def test_a_process_cannot_write_to_its_image(engine: Engine, target: str) -> None:
    with pytest.raises(CommandFailed, match="Read-only file system"):
        run(engine, target, "touch", "/opt/baton/new")


@pytest.mark.parametrize("target", ["router", "cpu"])
def test_an_image_says_what_it_is(engine: Engine, target: str) -> None:
    labels = inspected(engine, target)["Config"]["Labels"]
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert len(labels["org.opencontainers.image.revision"]) == 40
    image = inspected(engine, target)
    health = image["Healthcheck"] if engine.is_podman else image["Config"]["Healthcheck"]
    assert health["Test"] == ["CMD", "baton", "health"]


def test_the_list_of_packages_is_that_of_the_image(engine: Engine) -> None:
    router, cpu = packages(engine, "router"), packages(engine, "cpu")
    assert router >= {"grpcio", "pydantic", "tokenizers"}
    assert not router & {"torch", "transformers", "numpy", "huggingface_hub"}
    assert cpu >= router | {"torch", "transformers", "numpy"}


@pytest.mark.parametrize("target", ["router", "cpu"])
def test_an_image_has_what_openais_api_needs(engine: Engine, target: str) -> None:
    assert run(engine, target, "python", "-c", "import router.openai.server as it; print(it.__name__)").strip()


COMPILED = "import router.stream.lane as it; print(it.__file__.endswith('.so'))"


def test_routers_are_compiled_and_the_other_image_is_not(engine: Engine) -> None:
    assert run(engine, "router", "python", "-c", COMPILED).strip() == "True"
    assert run(engine, "cpu", "python", "-c", COMPILED).strip() == "False"


def test_the_cpu_image_has_a_torch_without_cuda(engine: Engine) -> None:
    version = run(engine, "cpu", "python", "-c", "import torch; print(torch.version.cuda)")
    assert version.strip() == "None"


@pytest.mark.parametrize(("target", "module"), [("router", "router"), ("cpu", "services")])
def test_a_process_reads_its_configuration(engine: Engine, target: str, module: str) -> None:
    config = f"deploy/config/{'router' if module == 'router' else 'worker'}.yaml"
    assert "0.0.0.0:7070" in run(
        engine, target, "python", "-m", module, config, "listen=0.0.0.0:7070", "--print-config"
    )


@pytest.mark.parametrize("seconds", [0, 0.3, 1, 3])
@pytest.mark.parametrize(("target", "module"), [("router", "router"), ("cpu", "services")])
def test_a_process_that_still_starts_ends_at_sigterm(engine: Engine, target: str, module: str, seconds: float) -> None:
    config = f"deploy/config/{'router' if module == 'router' else 'worker'}.yaml"
    # Of its own network, without a registry: a router that waits for one starts for as long.
    options = ["--detach", "--network", "none", "--no-healthcheck", *RESTRICTED]
    container = engine.run("run", *options, f"baton:{target}", "python", "-m", module, config).strip()
    try:
        time.sleep(seconds)
        started = time.monotonic()
        engine.run("stop", "--time", str(STOP_SECONDS), container)
        print(f"\n{module}: stopped {seconds} s after its start, gone in {time.monotonic() - started:.1f} s", end="")
        # Not 137: SIGKILL, after STOP_SECONDS. 143 says SIGTERM before it served.
        assert int(engine.run("inspect", "--format", "{{.State.ExitCode}}", container)) in (0, 143)
    finally:
        engine.run("rm", "--force", container)


def test_a_change_of_code_leaves_the_layers_of_dependencies(engine: Engine, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    ignored = shutil.ignore_patterns(".git", ".venv", "node_modules", "__pycache__", ".mypy_cache", "*_pb2*")
    shutil.copytree(images.ROOT, checkout, ignore=ignored)
    with (checkout / "router" / "__init__.py").open("a") as module:
        module.write(f"# {time.time_ns()}\n")
    before = inspected(engine, "cpu")["RootFS"]["Layers"]
    started = time.monotonic()
    images.build(engine, "cpu", CHOICES, checkout, "baton-changed:cpu")
    seconds = time.monotonic() - started
    try:
        after = json.loads(engine.run("image", "inspect", "baton-changed:cpu"))[0]["RootFS"]["Layers"]
    finally:
        engine.run("rmi", "baton-changed:cpu")
    print(f"\nrebuilt in {seconds:.1f} s")
    kept = [layer for layer in before if layer in after]
    assert len(before) - len(kept) <= 3
    assert kept == before[: len(kept)]
