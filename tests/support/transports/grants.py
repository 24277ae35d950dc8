"""Read permissions for tests of transports alone."""

from collections.abc import Collection

HANDOFF_ID = "a handoff of all blocks"


class EveryBlock:
    """Grants all blocks of a pool to one handoff."""

    def may_read(self, handoff_id: str, certificate: str, block_ids: Collection[int]) -> bool:
        """Grants reads as a ReadGuard."""
        return handoff_id == HANDOFF_ID
