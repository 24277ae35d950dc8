"""Who a worker is: what others call it, and which life of its process this is."""

import time
from dataclasses import dataclass, field
from typing import Literal

from rpc.errors import ModelNotFound, RoleMismatch, StaleEpoch

Role = Literal["encode", "prefill", "decode"]
ROLES: tuple[Role, ...] = ("encode", "prefill", "decode")


@dataclass(slots=True)
class Identity:
    """A worker's names. `address` is filled once its server listens; nothing else ever changes."""

    worker_id: str
    roles: tuple[Role, ...]
    model: str
    # Later processes have higher epochs, so that a registry can tell which of two records is the new one.
    epoch: int = field(default_factory=time.time_ns)
    address: str = ""
    certificate: str = ""  # the URI baton://worker/NAME in its certificate, if it has one

    def require_role(self, role: Role) -> None:
        """Raises RoleMismatch naming the roles that there are."""
        if role not in self.roles:
            raise RoleMismatch(f"worker {self.worker_id} does not {role}: its roles are {', '.join(self.roles)}")

    def require_model(self, model: str) -> None:
        """Raises ModelNotFound if another model is asked for; an empty name is any."""
        if model and model != self.model:
            raise ModelNotFound(f"worker {self.worker_id} does not serve {model!r}: it serves {self.model!r}")

    def require_epoch(self, epoch: int) -> None:
        """Raises StaleEpoch if another life of this process is meant."""
        if epoch != self.epoch:
            raise StaleEpoch(f"worker {self.worker_id} is in epoch {self.epoch}; the call is for {epoch}")
