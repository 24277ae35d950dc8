"""The file descriptors that a keeper holds, by name, and the fingerprints of what is in them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

_KV, _WEIGHTS = "kv", "weights"


@dataclass(frozen=True, slots=True)
class Found:
    """The descriptors of a name, none if nothing may be used; `stale` is the fingerprint of what had to be freed."""

    descriptors: Sequence[int] = ()
    stale: str = ""


@dataclass(frozen=True, slots=True)
class _Kept:
    fingerprint: str
    descriptors: tuple[int, ...]


class KeptDescriptors:
    """Owns descriptors. Memory without a name in the file system is freed with its last descriptor and mapping."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    @property
    def names(self) -> list[str]:
        """The names of all that is kept."""
        return list(self._kept)

    def put(self, name: str, fingerprint: str, descriptors: Sequence[int]) -> None:
        """Keeps descriptors in the place of those that the name had."""
        self.drop(name)
        self._kept[name] = _Kept(fingerprint, tuple(descriptors))

    def get(self, name: str, fingerprint: str) -> Found:
        """Returns what is kept if it has this fingerprint; frees it if it has another one."""
        kept = self._kept.get(name)
        if kept is None:
            return Found()
        if self.fits(name, fingerprint):
            return Found(kept.descriptors)
        self.drop(name)
        return Found(stale=kept.fingerprint)

    def move_to(self, other: "KeptDescriptors") -> None:
        """Gives all away, in the place of what the other has under these names."""
        for name, kept in self._kept.items():
            other.put(name, kept.fingerprint, kept.descriptors)
        self._kept.clear()

    def fits(self, name: str, fingerprint: str) -> bool:
        """True if something with this fingerprint is kept."""
        kept = self._kept.get(name)
        return kept is not None and kept.fingerprint == fingerprint

    def drop(self, name: str) -> bool:
        """Frees what is kept. False if there is nothing."""
        kept = self._kept.pop(name, None)
        for each in kept.descriptors if kept else ():
            os.close(each)
        return kept is not None


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
