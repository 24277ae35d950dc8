"""The next process of a worker that is upgraded: its share of kept memory until the worker has ended."""

from collections.abc import Sequence

from services.keeper.memory import Found, KeptDescriptors

_KV, _WEIGHTS = "kv", "weights"


class SuccessorsMemory:
    """Kept memory as the next process sees it.

    It loads all that it can while the worker serves: it gets the weights, which are never written, if they are the ones
    that it needs, and what it wants kept or freed has to wait. Once it asks for the KV, it waits for the worker to end:
    then it `is_ready`, or `problem` says why it cannot take over.
    """

    def __init__(self, kept: KeptDescriptors) -> None:
        self._kept = kept
        self._new = KeptDescriptors()
        self._unwanted: list[str] = []
        self._is_owner = self.is_ready = False
        self.problem = ""

    def get(self, name: str, fingerprint: str) -> Found | None:
        """Returns what is kept; None if the answer has to wait."""
        if self._is_owner:
            return self._kept.get(name, fingerprint)
        fits = self._kept.fits(name, fingerprint)
        if name == _WEIGHTS:
            return self._kept.get(name, fingerprint) if fits else Found()
        self.is_ready = fits and name == _KV
        if not self.is_ready:
            needs = f"it needs KV of another form: {fingerprint}" if name == _KV else "it keeps no KV"
            self.problem = f"the new process does not fit: {needs}"
        return None

    def put(self, name: str, fingerprint: str, descriptors: Sequence[int]) -> None:
        """Keeps descriptors, once it is its turn."""
        (self._kept if self._is_owner else self._new).put(name, fingerprint, descriptors)

    def drop(self, name: str) -> bool:
        """Frees what is kept, once it is its turn. False if there is nothing."""
        if self._is_owner:
            return self._kept.drop(name)
        self._unwanted.append(name)
        return self._new.drop(name)

    def take_over(self) -> None:
        """It is its turn: the worker has ended."""
        self._is_owner = True
        for name in self._unwanted:
            self._kept.drop(name)
        self._new.move_to(self._kept)

    def close(self) -> None:
        """Frees what is not kept yet."""
        for name in self._new.names:
            self._new.drop(name)
