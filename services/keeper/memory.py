"""The file descriptors that a keeper holds, by name, and the fingerprints of what is in them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass


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
