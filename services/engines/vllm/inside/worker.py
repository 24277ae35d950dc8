"""An extension of vLLM's workers, asked by `collective_rpc`. vLLM imports it in its own processes.

It touches private names of the NixlConnector, each behind a check: where a version lacks one, nothing is released early
and nothing is confirmed by it, which is safe.
"""

import importlib
from typing import Any

_SPIN = "pthrDelay"
_DELAY_MICROSECONDS = 1000


class BatonWorker:
    """Mixed into vLLM's worker by `worker_extension_cls`. Names begin with `baton_`, so that none collides."""

    def baton_release(self, request_id: str) -> bool:
        """Frees a prefill's blocks at the next step. Returns whether this rank holds them."""
        leases = _leases()
        if leases is None or request_id not in leases:
            return False
        leases[request_id] = 0.0
        return True

    def baton_holds(self, request_id: str) -> bool:
        """True if this rank still holds a prefill's blocks."""
        leases = _leases()
        return leases is not None and request_id in leases


def _leases() -> dict[str, float] | None:
    """Request ids of held blocks, and when they are freed."""
    state = importlib.import_module("vllm.distributed.kv_transfer.kv_transfer_state")
    if not state.has_kv_transfer_group():
        return None
    group = state.get_kv_transfer_group()
    for connector in (group, *getattr(group, "_connectors", ())):  # those of a MultiConnector
        leases = getattr(getattr(connector, "connector_worker", None), "_reqs_to_send", None)
        if isinstance(leases, dict):
            return leases
    return None


def _rest_between_looks() -> None:
    """Lets NIXL's progress thread sleep between two looks on CPUs: it spins, and takes a core from the model.

    On GPUs it has a core of its own, and each read would wait for it.
    """
    if not importlib.import_module("vllm.platforms").current_platform.is_cpu():
        return
    try:
        bindings: Any = importlib.import_module("nixl_cu13._bindings")
    except ImportError:
        return
    agent = bindings.nixlAgent

    def resting(name: str, config: Any, *others: Any) -> Any:
        if hasattr(config, _SPIN):
            setattr(config, _SPIN, _DELAY_MICROSECONDS)
        return agent(name, config, *others)

    bindings.nixlAgent = resting


_rest_between_looks()
