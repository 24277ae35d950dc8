"""A routing policy from outside of Baton: prompts that begin alike go to the same workers.

python -m router router.yaml routing.policy=sticky_policy:FirstTokens routing.policy_options.tokens=32
"""

from hashlib import sha256

from router.routing.policy import Candidates, Placement, RoutingRequest, W


class FirstTokens:
    """Sends prompts that begin alike to the same workers, so that these find the beginning in their prefix cache."""

    def __init__(self, tokens: int = 64) -> None:
        self._tokens = tokens

    def choose(self, request: RoutingRequest, candidates: Candidates[W]) -> Placement[W]:
        start = request.prompt.token_ids[: self._tokens]
        digest = sha256(f"{request.prompt.cache_salt} {start}".encode()).digest()
        number = int.from_bytes(digest[:8], "little")
        # Sorted, so that every router of the cluster chooses alike.
        decode = sorted(candidates.decode, key=_worker_id)
        chosen = decode[number % len(decode)]
        prefill = sorted(candidates.prefill_for(chosen), key=_worker_id)
        return Placement(
            chosen,
            prefill[number % len(prefill)] if prefill else None,
            explain=lambda: [f"hash of the first {len(start)} tokens: {number}"],
        )


def _worker_id(worker: W) -> str:
    return worker.record.worker_id
