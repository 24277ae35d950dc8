"""The plan of one run: the fleet, its requests, and its faults, all known before it starts, so that it can be shrunk.

A plan is a file of JSON. The seed of a plan also orders the loop, the network and the product's own randomness.
"""

import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

PROFILES = ("plain", "clients", "one_fault", "storm")
PROCESS_KINDS = ("kill", "vanish", "pause", "drain", "leave")
NETWORK_KINDS = ("reset", "half", "slow", "cut", "partition", "reset_all")
REGISTRY_KINDS = ("outage", "lost_lease", "expire", "blink")
KINDS = (PROCESS_KINDS, NETWORK_KINDS, REGISTRY_KINDS)
# How long after a step: at once, before its answer is there, or a few messages later.
MOMENTS = (0.0, 2e-4, 1e-3, 5e-3, 3e-2)
# Seconds of a fault: also just beyond the product's own times, until a worker is taken for hung, and until its record
# expires. A shorter one would lose no lease.
LENGTHS = (0.05, 0.5, 1.7, 3.3, 6.0, 15.0)
TENANTS = ("ann", "bob", "cy")
# OpenAI's completions and conversations; KServe's whole answers and streams.
HTTP_APIS, KSERVE_APIS = ("openai", "chat"), ("kserve", "kserve_stream")
APIS = HTTP_APIS + KSERVE_APIS
GUIDES = ("choice", "regex", "json")
CLIENTS = ("client-0", "client-1", "client-2", "client-3")


@dataclass(frozen=True)
class Fleet:
    """The processes of a run, and their configuration."""

    prefill: int = 2
    decode: int = 2
    mixed: int = 0
    encode: int = 1
    routers: int = 2
    transport: str = "remote"
    blocks: int = 48
    lease_seconds: float = 4.0
    step_seconds: float = 0.01
    prefill_rate: int = 10000
    ranks: int = 1
    early_tokens: int = 0
    inline_bytes: int = 2**20
    policy: str = "automatic"
    max_running: int = 0
    has_quotas: bool = False
    multiplex: bool = True
    answer_seconds: float = 10.0
    keep_parked: int = 256
    concurrent: int = 8  # requests of a tenant, if there are quotas
    requests_per_second: float = 20.0
    waiting_tokens: int = 1024  # unread by a slow client before its decode has to wait
    unsent_bytes: int = 64 * 1024  # of a stream before who writes to it has to wait
    window_bytes: int = 2**20  # of a stream; a connection's is eight times as large
    encode_seconds: float = 0.01
    embeddings_bytes: int = 256 * 2**20
    # Numbers of a row of an embedding, of which an image has four: a request with one fits into a window.
    image_hidden_size: int = 8
    pause_tokens: int = 64  # unread by a router before its call is paused
    large_bytes: int = 256 * 1024  # of a request that does not share its stream
    max_batch: int = 256
    max_waiting: int = 1024  # requests that wait for a place
    registry: str = "memory"  # or etcd
    processes: int = 1  # of each router: so many of `routers` listen at the same address
    keeps: bool = False  # its workers have keepers: kept/engine.py
    stands_by: bool = False  # the next process of each stands by
    hang_seconds: float = 10.0  # until a keeper kills a worker that is silent
    kept_slots: int = 64  # of each worker's journal
    kept_damage: float = 0.0  # how often a death damages kept blocks, and the share of them
    shares_memory: bool = False  # its mixed workers do, and there is room for one at a time

    @cached_property
    def workers(self) -> tuple[str, ...]:
        """The names of its workers."""
        counts = (("encode", self.encode), ("prefill", self.prefill), ("decode", self.decode), ("mixed", self.mixed))
        return tuple(f"{role}-{number}" for role, count in counts for number in range(count))

    @cached_property
    def router_names(self) -> tuple[str, ...]:
        """The names of its routers."""
        return tuple(f"router-{number}" for number in range(self.routers))

    def siblings(self, name: str) -> tuple[str, ...]:
        """The processes of a router, this one included."""
        first = int(name.rpartition("-")[2]) // self.processes * self.processes
        return self.router_names[first : first + self.processes]


@dataclass(frozen=True)
class Request:
    """One request, and what its client does."""

    at: float
    client: int
    router: int
    length: int
    prefix: int
    tokens: int
    seed: int
    image: bool = False
    timeout: float = 30.0
    leave_after: int = -1  # tokens; the client cancels
    leave_seconds: float = -1.0
    cancel_seconds: float = -1.0  # CancelGeneration
    window: int = 0  # of a client that reads slowly, in bytes
    read_seconds: float = 0.05  # until such a client has read a message
    together: int = 0
    keep: float = 0.0  # seconds; the client resumes
    drops: tuple[float, ...] = ()  # when a client that resumes loses its connection
    step: str = ""  # at the `step_count`-th such step of its own, and a moment later, the client does `step_act`
    step_count: int = 1
    step_delay: float = 0.0
    step_act: str = "leave"  # or cancel, drop
    by_handle: bool = False  # it cancels by its answer's handle, once it has that, perhaps at another router
    retries: int = 0  # how often a client sends it again that was told UNAVAILABLE
    tenant: str = ""
    api: str = ""  # or one of APIS
    answers: int = 1
    guided: str = ""  # or one of GUIDES: the answer follows that grammar

    @property
    def disturbs(self) -> bool:
        """True if its client does not wait for the end."""
        is_aimed = bool(self.step) and self.step_act != "drop"
        return is_aimed or self.timeout < 30 or max(self.leave_after, self.leave_seconds, self.cancel_seconds) >= 0


@dataclass(frozen=True)
class Fault:
    """A fault from `at` on, for some seconds. `others` are the other side of a cut.

    One with a `step` happens at the `count`-th such step, `at` seconds later, to the node that does it if it has no
    `target`.
    """

    at: float
    kind: str
    target: str
    others: tuple[str, ...] = ()
    seconds: float = 0.0
    step: str = ""
    count: int = 1


@dataclass(frozen=True)
class Plan:
    """One run."""

    seed: int
    profile: str
    fleet: Fleet = Fleet()
    requests: tuple[Request, ...] = ()
    faults: tuple[Fault, ...] = ()
    hiccup_every: float = 0.0  # seconds between moments at which one event loop is held; 0 is never
    hiccup_seconds: float = 0.0
    turn_seconds: float = 20e-6  # what a turn of the event loop takes
    rounds: int = 1  # how often the requests are sent: tables are compared after each time
    exits: tuple[tuple[float, int], ...] = ()  # when the process of a client ends, with all its requests; and which
    notes: str = field(default="", compare=False)

    def to_json(self) -> str:
        """For a file."""
        return json.dumps(asdict(self), indent=1)


def read_plan(path: Path) -> Plan:
    """The plan of a file."""
    return from_values(json.loads(path.read_text(encoding="utf-8")))


def from_values(values: dict[str, Any]) -> Plan:
    """The plan that `asdict` has taken apart."""
    requests = tuple(Request(**{**one, "drops": tuple(one["drops"])}) for one in values.pop("requests"))
    faults = tuple(Fault(**{**one, "others": tuple(one["others"])}) for one in values.pop("faults"))
    exits = tuple((at, client) for at, client in values.pop("exits", ()))
    return Plan(fleet=Fleet(**values.pop("fleet")), requests=requests, faults=faults, exits=exits, **values)
