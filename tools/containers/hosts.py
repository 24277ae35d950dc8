"""A cluster whose every process is in a container of its own, as if on its own host, and what can go wrong with those.

The containers are on a bridge with IPv4 and IPv6, and know each other by name. Workers run the simulated engine, ranks
the embedded one.
"""

import ipaddress
import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tools.containers import stand_ins
from tools.containers.engine import CommandFailed, Engine

NETWORK = "baton-hosts"
# A container that is started again has another address, from the lower half of the network. Clients have that of the
# router, which no name here leads to.
SUBNETS = ("--subnet", "10.123.45.0/24", "--ip-range", "10.123.45.0/25", "--ipv6", "--subnet", "fd00:ba70::/64")
ROUTER_ADDRESS = ("--ip", "10.123.45.250", "--ip6", "fd00:ba70::fa")
MOVED_TO = range(128, 228)
RESTRICTED = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "all", "--security-opt", "no-new-privileges")
DIRECTIONS = ("INPUT", "OUTPUT")
# Of ranks: where rank 0 waits for the others, and where each has its health and metrics.
LEADER_PORT, METRICS_PORT = 29500, 9464
TOKEN_SECONDS = 0.02
# Debian's; a process that loads it sees the clock that FAKETIME says.
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")


@dataclass(frozen=True)
class Host:
    """A container of the cluster. Commands on it raise CommandFailed."""

    engine: Engine
    name: str

    @property
    def container(self) -> str:
        """Its name for the engine."""
        return f"{NETWORK}-{self.name}"

    def kill(self) -> None:
        """Ends its process at once, as a crash of the host does."""
        self.engine.run("kill", self.container)

    def pause(self) -> None:
        """Freezes its process."""
        self.engine.run("pause", self.container)

    def resume(self) -> None:
        """Ends the freeze."""
        self.engine.run("unpause", self.container)

    def start(self) -> None:
        """Starts it again after its end."""
        self.engine.run("start", self.container)

    def stop(self) -> int:
        """Sends SIGTERM and waits for its drain; the exit code."""
        self.engine.run("stop", "--time", "60", self.container)
        return self.exit_code()

    def exit_code(self) -> int:
        """Its process's exit status: 128 and the signal's number, if that ended it."""
        return int(self.engine.run("inspect", "--format", "{{.State.ExitCode}}", self.container))

    def exceed_memory(self) -> None:
        """Fills its /tmp, which counts as its memory, until the kernel ends a process for the limit of its cgroup."""
        command = self.engine.command("exec", self.container, "dd", "if=/dev/zero", "of=/tmp/full", "bs=1M")
        # It is ended too.
        subprocess.run(command, capture_output=True, env=self.engine.environment)

    def is_running(self) -> bool:
        """True if its process still runs."""
        return self.engine.run("inspect", "--format", "{{.State.Running}}", self.container).strip() == "true"

    def address(self) -> str:
        """Its IPv4 address on the network now."""
        return self._network()["IPAddress"]

    def address_v6(self) -> str:
        """Its IPv6 address on the network now."""
        return self._network()["GlobalIPv6Address"]

    def move(self) -> None:
        """Stops it, and starts it again at another address, as a rescheduled pod has."""
        old = ipaddress.IPv4Address(self.address()).packed
        new = ipaddress.IPv4Address(old[:3] + bytes([MOVED_TO[(old[3] + 1) % len(MOVED_TO)]]))
        self.engine.run("stop", "--time", "1", self.container)
        self.engine.run("network", "disconnect", NETWORK, self.container)
        self.engine.run("network", "connect", "--ip", str(new), "--alias", self.name, NETWORK, self.container)
        self.start()

    def cut(self, direction: str, other: "Host") -> None:
        """Drops everything that it gets from the other (INPUT), or sends it (OUTPUT)."""
        self._iptables("--append", direction, other)

    def mend(self, direction: str, other: "Host") -> None:
        """Ends the cut."""
        self._iptables("--delete", direction, other)

    def logs(self) -> str:
        """The end of what it printed since it was started last."""
        started = json.loads(self.engine.run("inspect", self.container))[0]["State"]["StartedAt"]
        command = self.engine.command("logs", "--tail", "20", "--since", started, self.container)
        done = subprocess.run(command, capture_output=True, text=True, env=self.engine.environment)
        return done.stdout + done.stderr

    def _iptables(self, action: str, direction: str, other: "Host") -> None:
        end = "--source" if direction == "INPUT" else "--destination"
        process = self.engine.run("inspect", "--format", "{{.State.Pid}}", self.container).strip()
        # Their names have an address of each kind, and a client whose calls fail at one tries the other.
        for program, address in (("iptables", other.address()), ("ip6tables", other.address_v6())):
            rule = [program, action, direction, end, address, "--jump", "DROP"]
            done = subprocess.run(["nsenter", "--target", process, "--net", *rule], capture_output=True, text=True)
            if done.returncode != 0:
                raise CommandFailed(done.stderr)

    def _network(self) -> dict[str, str]:
        networks = json.loads(self.engine.run("inspect", self.container))[0]["NetworkSettings"]["Networks"]
        found: dict[str, str] = networks[NETWORK]
        return found


class Cluster:
    """The hosts of a network, by name."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.hosts: dict[str, Host] = {}

    def add_etcd(self, megabytes: int = 160) -> Host:
        """Starts etcd, with a disk of this size. It allocates two files of 64 MB at its start, and may end without."""
        urls = ["--listen-client-urls=http://[::]:2379", "--advertise-client-urls=http://etcd:2379"]
        command = ["etcd", "--data-dir=/data/etcd", "--log-level=error", *urls]
        return self._start("etcd", ["--tmpfs", f"/data:size={megabytes}m"], stand_ins.IMAGES["etcd"], command)

    def add_router(self) -> Host:
        """Starts the router, at an address that it keeps."""
        command = ["python", "-m", "router", "deploy/config/router.yaml", *self._common("probe.interval_seconds=0.5")]
        return self._start("router", [*ROUTER_ADDRESS, *RESTRICTED], "baton:router", command)

    def add_worker(self, name: str, *options: str, arguments: Sequence[str] = ()) -> Host:
        """Starts a worker of the role before the hyphen of its name; `options` are the container's, as `--env=A=B`."""
        role = name.partition("-")[0]
        engine = ("engine.kind=simulated", "engine.model=''", f"engine.decode_step_seconds={TOKEN_SECONDS}")
        common = self._common(f"worker_id={name}", "transports=[shm,tcp]", *engine, *arguments)
        command = ["python", "-m", "services", f"deploy/config/{role}.yaml", *common]
        return self._start(name, [*RESTRICTED, *options], "baton:cpu", command)

    def add_rank(self, rank: int, lost_seconds: float) -> Host:
        """Starts one of the two ranks of a worker on the demonstration model, which meet at rank 0's name."""
        name = f"rank-{rank}"
        group = [f"leader=rank-0:{LEADER_PORT}", f"rank={rank}", f"lost_seconds={lost_seconds}"]
        engine = ["engine.tensor_parallel_size=2", *(f"engine.multi_node.{each}" for each in group)]
        engine += ["engine.device=cpu", "engine.threads=1", "engine.max_sequences=8"]
        common = self._common(f"worker_id={name}", "transports=[tcp]", f"metrics_listen='[::]:{METRICS_PORT}'", *engine)
        command = ["python", "-m", "services", "deploy/config/decode.yaml", *common]
        return self._start(name, RESTRICTED, "baton:cpu", command)

    def beside(self, name: str) -> list[str]:
        """Options of a worker on the host of another: they see each other's processes, and so share memory."""
        return ["--pid", f"container:{self.hosts[name].container}"]

    def _common(self, *arguments: str) -> list[str]:
        return ["listen='[::]:7070'", "registry.endpoints=[etcd:2379]", "log.format=json", *arguments]

    def _start(self, name: str, options: Sequence[str], image: str, command: Sequence[str]) -> Host:
        host = Host(self._engine, name)
        names = ["--name", host.container, "--hostname", name, "--network", NETWORK, "--network-alias", name]
        self._engine.run("run", "--detach", "--no-healthcheck", *names, *options, image, *command)
        self.hosts[name] = host
        return host


@contextmanager
def open_cluster(engine: Engine) -> Iterator[Cluster]:
    """An empty network; its containers are removed at the end. Raises CommandFailed."""
    stand_ins.make(engine, "etcd")
    with TemporaryDirectory(prefix=f"{NETWORK}-") as folder:
        engine = engine.within(Path(folder))
        engine.run("network", "create", *SUBNETS, NETWORK)
        cluster = Cluster(engine)
        try:
            yield cluster
        finally:
            # The last first, as it may depend on earlier ones.
            for host in reversed(cluster.hosts.values()):
                engine.run("rm", "--force", "--volumes", "--time", "0", host.container)
            engine.run("network", "rm", "--force", NETWORK)
