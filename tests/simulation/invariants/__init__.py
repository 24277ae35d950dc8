"""The invariants of every run, whatever goes wrong: a class each. docs/simulation.md says which have caught something.

base (what they are told), answers, ends (statuses, cancelled work, leases), cancels (by handle; and wrong replies),
agreement (of both ends), blocks, tables, fleet (recovery, quotas, logs), keepers (kept memory).
"""

from simulation.invariants.agreement import (
    CallsHaveCallers,
    DeadlinesArePassedOn,
    NothingWaitsForTheLost,
    WindowsAgree,
)
from simulation.invariants.answers import (
    AnswersAreRight,
    GuidedAnswersFollow,
    ImagesAreTheirOwn,
    ResumptionsGoOn,
    SequencesAreWhole,
    UsageIsRight,
)
from simulation.invariants.base import Invariant
from simulation.invariants.blocks import BlocksHaveOneOwner, EngineFollowsCalls, KvIsConfirmed, KvIsOfItsPrompt
from simulation.invariants.cancels import CancelsByHandleHold, RepliesAreRight
from simulation.invariants.ends import (
    CancelledWorkStops,
    EveryCallEnds,
    ExpiredLeasesAreExplained,
    ExpiredLeasesAreFreed,
    RequestsAreSomewhere,
    StatusesAreRight,
)
from simulation.invariants.fleet import (
    LimitsHold,
    MemoryIsShared,
    NoUnexplainedError,
    QuotasHold,
    Recovers,
    ViewsAreFresh,
)
from simulation.invariants.keepers import (
    KeptKvIsOfItsTokens,
    KeptMemoryHasItsForm,
    KeptMemoryHasOneOwner,
    KeptMemoryIsFreed,
    LeftAnswersAreWhole,
    RestartsFindTheirKv,
)
from simulation.invariants.tables import NothingIsLeft, TablesShrink

INVARIANTS: tuple[type[Invariant], ...] = (
    AnswersAreRight,
    GuidedAnswersFollow,
    ImagesAreTheirOwn,
    SequencesAreWhole,
    UsageIsRight,
    ResumptionsGoOn,
    EveryCallEnds,
    StatusesAreRight,
    CancelledWorkStops,
    CancelsByHandleHold,
    RepliesAreRight,
    RequestsAreSomewhere,
    CallsHaveCallers,
    NothingWaitsForTheLost,
    DeadlinesArePassedOn,
    WindowsAgree,
    ExpiredLeasesAreExplained,
    ExpiredLeasesAreFreed,
    BlocksHaveOneOwner,
    KvIsOfItsPrompt,
    KvIsConfirmed,
    EngineFollowsCalls,
    NothingIsLeft,
    TablesShrink,
    Recovers,
    ViewsAreFresh,
    QuotasHold,
    LimitsHold,
    MemoryIsShared,
    KeptKvIsOfItsTokens,
    KeptMemoryHasOneOwner,
    KeptMemoryHasItsForm,
    KeptMemoryIsFreed,
    RestartsFindTheirKv,
    LeftAnswersAreWhole,
    NoUnexplainedError,
)

__all__ = ["INVARIANTS", "Invariant"]
