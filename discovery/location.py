"""Places of workers: zone, rack and host, of which some may be unknown; how near two are, and bounds on handoffs."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

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
