"""What is held for a caller who goes away before he learns of it."""

from collections.abc import Sequence
from typing import Any

from services.leases import LeaseTable


def free_if_unsent(context: Any, handoff_ids: Sequence[str], leases: LeaseTable) -> None:
    """Frees handoffs at once if the call ends before the answer is on its way."""

    def free(ended: Any) -> None:
        if not ended.done():
            for handoff_id in handoff_ids:
                leases.discard(handoff_id)

    if handoff_ids:
        context.add_done_callback(free)
