"""A Compose project of deploy/compose on this machine, by podman-compose or docker compose."""

import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tools.containers import stand_ins
from tools.containers.engine import CommandFailed, Engine

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "compose"
FILES: Mapping[str, Sequence[str]] = {
    "agg": ["agg.yaml"],
    "disagg": ["disagg.yaml"],
    "epd": ["epd.yaml"],
    "envoy": ["disagg.yaml", "envoy.yaml"],
}
# Everything but Grafana, which nothing here can stand in for.
PLATFORM = ("etcd", "traces", "prometheus")
PORTS = ("BATON_PORT", "BATON_ENVOY_PORT", "BATON_TRACES_PORT", "BATON_PROMETHEUS_PORT")
UP_SECONDS = 300.0
DOWN_SECONDS = 300.0


@dataclass(frozen=True)
class Project:
    """The commands of one project, whose containers, networks and volumes have its name."""

    engine: Engine
    name: str
    files: Sequence[Path]
    variables: Mapping[str, str] = field(default_factory=dict)

    def compose(self, *arguments: str, seconds: float = UP_SECONDS) -> str:
        """Runs a command of Compose. Raises CommandFailed."""
        environment = {**self.engine.environment, **self.variables}
        files = [word for path in self.files for word in ("--file", str(path))]
        command = [*self._program(), "--project-name", self.name, *files, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
        if done.returncode != 0:
            raise CommandFailed(f"compose {' '.join(arguments)}: {(done.stdout + done.stderr).strip()[-3000:]}")
        return done.stdout

    def containers(self) -> list[str]:
        """The names of its containers, stopped ones too."""
        return self._owned("ps", "--all", "--format", "{{.Names}}")

    def leftovers(self) -> list[str]:
        """The containers, networks and volumes that still exist."""
        networks = self._owned("network", "ls", "--format", "{{.Name}}")
        return [*self.containers(), *networks, *self._owned("volume", "ls", "--format", "{{.Name}}")]

    def is_healthy(self, container: str) -> bool:
        """True if the container's health check passes now; true if it has none."""
        if self.engine.is_podman:
            return self._checked(container)
        state = self.engine.run("inspect", "--format", "{{if .State.Health}}{{.State.Health.Status}}{{end}}", container)
        return state.strip() in ("", "healthy")

    def _checked(self, container: str) -> bool:
        """Runs the check of a container: podman leaves that to timers of systemd, which need not be there."""
        kind = "{{if .Config.Healthcheck}}{{index .Config.Healthcheck.Test 0}}{{end}}"
        if self.engine.run("inspect", "--format", kind, container).strip() in ("", "NONE"):
            return True
        command = self.engine.command("healthcheck", "run", container)
        return subprocess.run(command, capture_output=True, env=self.engine.environment).returncode == 0

    def _owned(self, *arguments: str) -> list[str]:
        label = f"label=com.docker.compose.project={self.name}"
        return self.engine.run(*arguments, "--filter", label).split()

    def _program(self) -> list[str]:
        if self.engine.is_podman:
            return [str(Path(sys.executable).with_name("podman-compose"))]
        return self.engine.command("compose")


@contextmanager
def open_project(engine: Engine, mode: str) -> Iterator[Project]:
    """Starts a topology with its platform, on free ports; ends it with its volumes. Raises CommandFailed."""
    for name in stand_ins.IMAGES:
        stand_ins.make(engine, name)
    variables = {name: str(_free_port()) for name in PORTS}
    variables |= {f"BATON_{name.upper()}_IMAGE": image for name, image in stand_ins.IMAGES.items()}
    project = Project(engine, f"baton-{mode}", [FOLDER / name for name in FILES[mode]], variables)
    try:
        project.compose("up", "--detach", "--no-build", *services(mode))
        yield project
    except BaseException:
        # What was added by scaling is in no file: `down` would leave it, and it would be started again and again.
        # Containers that others depend on cannot be removed yet, and are in the files.
        if containers := project.containers():
            with suppress(CommandFailed):
                engine.run("rm", "--force", "--volumes", *containers)
        raise
    finally:
        project.compose("down", "--volumes", seconds=DOWN_SECONDS)


def services(mode: str) -> list[str]:
    """The containers of a topology."""
    named = [yaml.safe_load((FOLDER / name).read_text())["services"] for name in FILES[mode]]
    return [*PLATFORM, *(name for each in named for name in each)]


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port
