"""The types of the fixtures for tests of the `baton` command: its outcome, and a cluster for it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a forked command imports this module
    from services.server import Worker


@dataclass(frozen=True)
class Outcome:
    """The exit status of a command, and its output."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


Baton = Callable[..., Awaitable[Outcome]]


@dataclass(frozen=True)
class SmallCluster:
    """A router and its workers, all in this process."""

    address: str
    prefill: "Worker"
    decode: "Worker"

    @property
    def blocks_used(self) -> int:
        return self.prefill.engine.load().blocks_used + self.decode.engine.load().blocks_used
