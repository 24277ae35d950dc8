"""The worker record that a worker registers, and its JSON.

Places of workers: zone, rack and host, of which some may be unknown; how near two are, and bounds on handoffs.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal, TypeAlias

from runtime.clock import wall_time_ns

Domain: TypeAlias = Literal["zone", "rack", "host"]
"""What two workers have in common; each is a part of the one before it."""

DOMAINS: tuple[Domain, ...] = ("zone", "rack", "host")

# Names of nodes in Kubernetes have so many characters at most.
LABEL = r"[A-Za-z0-9._:/-]{0,253}"


@dataclass(frozen=True, slots=True)
class Location:
    """The labels of a worker's place; an empty one is unknown."""

    zone: str = ""
    rack: str = ""
    host: str = ""

    def key(self, domain: Domain) -> tuple[str, ...]:
        """The domain as one of all: racks of one name may be in several zones. Empty if it is unknown."""
        labels = (self.zone, self.rack, self.host)[: DOMAINS.index(domain) + 1]
        return labels if labels[-1] else ()

    @property
    def in_words(self) -> str:
        """The labels that are known."""
        labels = zip(DOMAINS, (self.zone, self.rack, self.host), strict=True)
        return ", ".join(f"{domain} {label}" for domain, label in labels if label) or "no known place"


UNKNOWN = Location()


def is_within(domain: Domain, one: Location, other: Location) -> bool:
    """True if both are known to be in the same zone, rack or host."""
    return bool(one.key(domain)) and one.key(domain) == other.key(domain)


def nearness(one: Location, other: Location) -> Domain | Literal[""]:
    """The least that two workers have in common; empty if that is nothing known."""
    return next((domain for domain in reversed(DOMAINS) if is_within(domain, one, other)), "")


def steps_apart(one: Location, other: Location) -> int:
    """0 on one host, 1 in one rack, 2 in one zone, else 3."""
    nearest = nearness(one, other)
    return len(DOMAINS) - 1 - DOMAINS.index(nearest) if nearest else len(DOMAINS)


_Json: TypeAlias = object

_INTEGER_LIMIT = 2**64  # integers are sent on as uint64
_LONGEST_RECORD = 65_536  # bytes; parsing as many of the worst JSON takes two milliseconds
_LONGEST_TEXT = 4096  # characters
_LONGEST_LIST = 256
_MAX_RANKS = 512  # a router looks at each for every request: measured 0.5 ms for 512 of one worker, 2 ms for 4,096

# The capability of workers that take the calls of one router over a shared stream.
MULTIPLEX = "multiplex"

# The capability of workers that serve adapters, and tell which by WorkerService.WatchLoras.
LORA = "lora"

# The capability of workers whose engine allocates for a prompt before another worker computes it.
ALLOCATES_FIRST = "allocates_first"

# The capability of workers that hand KV over, and take it, while the prompt is computed.
EARLY_HANDOFF = "early_handoff"

# The capability of workers that keep bad words out of answers. Those of a version before ignore what they do not know.
BAD_WORDS = "bad_words"

# The capability of workers whose decodes go on, if that was asked for, when the router that reads them is gone.
KEEPS_STREAMS = "keeps_streams"

# The capability of those whose decodes then also go on in their next process, when this one is lost.
TAKES_OVER = "takes_over"

# The capability of workers whose running decodes can go on on another one, with their KV.
MOVES_DECODES = "moves_decodes"

# The capability of workers that lend blocks of their prefix caches, and borrow others'.
PREFIX_LOANS = "prefix_loans"

# The capability of workers that digest what they hold, and of those that take no handoff whose owner does not.
DIGESTS_HANDOFFS = "digests_handoffs"
CHECKS_HANDOFFS = "checks_handoffs"


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker as others find it. `epoch` is its process's incarnation: a restarted worker has a higher one."""

    worker_id: str
    epoch: int
    address: str  # host:port of its gRPC server
    roles: tuple[str, ...]  # encode, prefill, decode, embed
    model: str
    engine: str
    layout_digest: str
    max_context_tokens: int
    capabilities: tuple[str, ...] = ()
    data_parallel_ranks: int = 1
    draining: bool = False
    certificate: str = ""  # the URI in its certificate, by which other workers identify it
    layout: str = ""  # describes the layout of `layout_digest`
    offers: tuple[str, ...] | None = None  # transports by which its KV can be read; None if it does not say
    reads: tuple[str, ...] | None = None  # transports by which it reads others'; None if it does not say
    location: Location = UNKNOWN

    @property
    def process(self) -> str:
        """The name of this process of the worker: a restart changes it."""
        return f"{self.worker_id}@{self.epoch}"

    @property
    def host(self) -> str:
        """The host of `address`; an IPv6 address without its brackets."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def known_location(self) -> Location:
        """Its location, with the host of its address unless another is told."""
        return self.location if self.location.host else replace(self.location, host=self.host)

    def to_json(self) -> bytes:
        """The record as stored."""
        return json.dumps(asdict(self), ensure_ascii=False, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "WorkerRecord":
        """Reads a stored record. Raises ValueError naming the key that is missing or wrong.

        Ignores unknown keys, which newer versions may add. Keys with a default may be missing: older versions did not
        write them.
        """
        fields = _parse(text)
        return cls(
            worker_id=_text(fields, "worker_id"),
            epoch=_integer(fields, "epoch"),
            address=_text(fields, "address"),
            roles=_texts(fields, "roles"),
            model=_text(fields, "model"),
            engine=_text(fields, "engine"),
            layout_digest=_text(fields, "layout_digest"),
            max_context_tokens=_integer(fields, "max_context_tokens"),
            capabilities=_texts({"capabilities": [], **fields}, "capabilities"),
            data_parallel_ranks=_ranks({"data_parallel_ranks": 1, **fields}, "data_parallel_ranks"),
            draining=_flag({"draining": False, **fields}, "draining"),
            certificate=_text({"certificate": "", **fields}, "certificate"),
            layout=_text({"layout": "", **fields}, "layout"),
            offers=None if fields.get("offers") is None else _texts(fields, "offers"),
            reads=None if fields.get("reads") is None else _texts(fields, "reads"),
            location=_location(fields.get("location", {})),
        )


def epoch_after(seen: int) -> int:
    """An epoch above `seen`, the epoch of an earlier process of this worker; -1 if there was none.

    It is the wall clock's nanoseconds, unless that clock is behind `seen`.
    """
    return min(max(wall_time_ns(), seen + 1), _INTEGER_LIMIT - 1)


def _parse(text: bytes) -> Mapping[str, _Json]:
    if len(text) > _LONGEST_RECORD:
        raise ValueError(f"has {len(text)} of at most {_LONGEST_RECORD} bytes")
    try:
        parsed: _Json = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError("not a JSON object")
    return parsed


def _value(fields: Mapping[str, _Json], key: str) -> _Json:
    if key not in fields:
        raise ValueError(f"{key} is missing")
    return fields[key]


def _text(fields: Mapping[str, _Json], key: str) -> str:
    value = _value(fields, key)
    if not isinstance(value, str) or not _is_unicode(value):
        raise ValueError(f"{key} is not a string: {value!r:.100}")
    if len(value) > _LONGEST_TEXT:
        raise ValueError(f"{key} has {len(value)} of at most {_LONGEST_TEXT} characters")
    return value


def _texts(fields: Mapping[str, _Json], key: str) -> tuple[str, ...]:
    value = _value(fields, key)
    if not isinstance(value, list):
        raise ValueError(f"{key} is not a list of strings: {value!r:.100}")
    if len(value) > _LONGEST_LIST:
        raise ValueError(f"{key} has {len(value)} of at most {_LONGEST_LIST} entries")
    return tuple(_text({f"{key}[{index}]": item}, f"{key}[{index}]") for index, item in enumerate(value))


def _integer(fields: Mapping[str, _Json], key: str) -> int:
    value = _value(fields, key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _INTEGER_LIMIT:
        raise ValueError(f"{key} is not an integer from 0 to 2^64 - 1: {value!r:.100}")
    return value


def _ranks(fields: Mapping[str, _Json], key: str) -> int:
    value = _integer(fields, key)
    if not 1 <= value <= _MAX_RANKS:
        raise ValueError(f"{key} is not 1 to {_MAX_RANKS}: {value}")
    return value


def _location(labels: _Json) -> Location:
    if not isinstance(labels, dict):
        raise ValueError(f"location is not an object: {labels!r:.100}")
    found = {name: _text({name: labels.get(name, "")}, name) for name in ("zone", "rack", "host")}
    for name, label in found.items():
        if not re.fullmatch(LABEL, label):
            raise ValueError(f"location.{name} is not a label: {label!r:.100}")
    return Location(**found)


def _flag(fields: Mapping[str, _Json], key: str) -> bool:
    value = _value(fields, key)
    if not isinstance(value, bool):
        raise ValueError(f"{key} is not true or false: {value!r:.100}")
    return value


def _is_unicode(text: str) -> bool:
    # JSON can contain half of a surrogate pair, which a protobuf string cannot.
    return not any(0xD800 <= ord(character) < 0xE000 for character in text)
