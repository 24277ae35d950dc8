"""Which workers hold which KV blocks: one index for all workers, searched once for each prompt.

A block is named by the hash chain of `engine_protocol.prefix_hash`; its key here is the first eight bytes of that hash.
Two blocks with equal keys count as one: among a million blocks the probability is 3e-8, and the consequence is a wrong
estimate, never a wrong token. A *holder* is one prefix cache, of a worker's data-parallel rank.
"""

import struct
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Generic, TypeVar

HolderT = TypeVar("HolderT", bound=Hashable)

# Many small dicts instead of one: no insertion waits until a dict of all blocks has been copied to a larger one.
_SHARDS = 256
_LAST = _SHARDS - 1
# How many shards each change cleans of holders that were cleared.
_SWEPT_SHARDS = 2
# For so many sets of holders it is remembered who they are.
_MOST_SETS = 1024
# A search looks at fewer than twice as many blocks of a prompt: a million tokens have 62,500, and the loop waits.
_LOOKED_UP = 4096


def block_keys(hashes: Iterable[bytes]) -> list[int]:
    """The keys of block hashes, in their order. Each hash has at least eight bytes."""
    starts = [each[:8] for each in hashes]
    return list(struct.unpack(f"<{len(starts)}Q", b"".join(starts)))


def chain_keys(hashes: Sequence[bytes]) -> list[int]:
    """The keys of `block_keys`, quicker, for hashes of sixteen bytes."""
    return list(_first_halves(len(hashes)).unpack(b"".join(hashes)))


@lru_cache(256)
def _first_halves(count: int) -> struct.Struct:
    return struct.Struct("<" + "Q8x" * count)


class _Holder:
    __slots__ = ("bit", "num_blocks")

    def __init__(self, bit: int) -> None:
        self.bit = bit  # an int with one bit set
        self.num_blocks = 0


class KvIndex(Generic[HolderT]):
    """The blocks of each holder, and how many of a prompt's blocks each one has.

    For each block it has an int whose bits are the holders. No operation takes longer the more blocks there are.
    """

    def __init__(self) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(_SHARDS)]
        self._holders: dict[HolderT, _Holder] = {}
        self._by_bit: dict[int, HolderT] = {}
        self._by_bits: dict[int, list[HolderT]] = {}  # of sets that were found lately
        self._valid = 0  # the bits of all holders
        self._free: list[int] = []
        self._num_bits = 0
        self._cleared = 0  # bits that no holder has any more, and that some blocks may still have
        self._sweeping = 0  # those among them that this pass over all shards removes
        self._next_shard = 0

    @property
    def holders(self) -> Sequence[HolderT]:
        """All that have stored something and were not dropped."""
        return tuple(self._holders)

    @property
    def num_bits(self) -> int:
        """The most bits in the int of a block: for holders, and for those whose blocks are being removed."""
        return self._num_bits

    def num_blocks(self, holder: HolderT) -> int:
        """The number of a holder's blocks; 0 for an unknown one."""
        found = self._holders.get(holder)
        return found.num_blocks if found else 0

    def holds(self, holder: HolderT, key: int) -> bool:
        """True if a holder has a block."""
        found = self._holders.get(holder)
        return found is not None and bool(self._shards[key & _LAST].get(key, 0) & found.bit)

    def store(self, holder: HolderT, keys: Iterable[int]) -> None:
        """Adds blocks to a holder, which is added to the index if it is new."""
        found = self._holders.get(holder)
        if found is None:
            found = self._holders[holder] = _Holder(self._take_bit(holder))
        bit, shards, added = found.bit, self._shards, 0
        # Blocks in a row mostly have the same holders. They share one int, which is quicker to read in a search.
        before, after = 0, bit
        for key in keys:
            shard = shards[key & _LAST]
            bits = shard.get(key, 0)
            if bits != before:
                before, after = bits, bits | bit
            if after != bits:
                shard[key] = after
                added += 1
        found.num_blocks += added
        self._sweep()

    def remove(self, holder: HolderT, keys: Iterable[int]) -> None:
        """Takes blocks from a holder. Ignores blocks that it does not have."""
        found = self._holders.get(holder)
        if found is None:
            return
        bit, shards, removed = found.bit, self._shards, 0
        for key in keys:
            shard = shards[key & _LAST]
            bits = shard.get(key, 0)
            if bits & bit:
                removed += 1
                if bits == bit:
                    del shard[key]
                else:
                    shard[key] = bits ^ bit
        found.num_blocks -= removed
        self._sweep()

    def clear(self, holder: HolderT) -> None:
        """Takes all blocks from a holder, at once; its place in the shards is cleaned later, piece by piece."""
        found = self._holders.get(holder)
        if found is not None and found.num_blocks:
            self._give_up_bit(found)
            self._holders[holder] = _Holder(self._take_bit(holder))

    def drop(self, holder: HolderT) -> None:
        """Removes a holder and its blocks."""
        found = self._holders.pop(holder, None)
        if found is not None:
            self._give_up_bit(found)

    def match(self, keys: Sequence[int]) -> dict[HolderT, int]:
        """The number of a prompt's blocks at each holder, from the first one without a gap; only holders of any.

        Of a very long prompt some blocks are passed over: the numbers may be a little too small, and a gap not seen.
        """
        alive, shards, count = self._valid, self._shards, 0
        matched: dict[HolderT, int] = {}
        if not alive:
            return matched
        last, step = -1, max(1, len(keys) // _LOOKED_UP)
        for key in keys if step == 1 else keys[step - 1 :: step]:
            bits = shards[key & _LAST].get(key, 0)
            if bits != last:
                last = bits
                still = alive & bits
                if still != alive:
                    if count:
                        matched |= dict.fromkeys(self._holders_of(alive ^ still), count)
                    if not still:
                        return matched
                    alive = still
            count += step
        if count:
            matched |= dict.fromkeys(self._holders_of(alive), count)
        return matched

    def _holders_of(self, bits: int) -> Sequence[HolderT]:
        """The holders that bits stand for, remembered until there are other holders."""
        found = self._by_bits.get(bits)
        if found is None:
            if len(self._by_bits) >= _MOST_SETS:
                self._by_bits.clear()
            found = self._by_bits[bits] = [self._by_bit[bit] for bit in _single_bits(bits)]
        return found

    def _take_bit(self, holder: HolderT) -> int:
        if self._free:
            bit = self._free.pop()
        else:
            bit = 1 << self._num_bits
            self._num_bits += 1
        self._valid |= bit
        self._by_bit[bit] = holder
        self._by_bits.clear()
        return bit

    def _give_up_bit(self, found: _Holder) -> None:
        self._valid &= ~found.bit
        del self._by_bit[found.bit]
        self._by_bits.clear()
        self._cleared |= found.bit

    def _sweep(self) -> None:
        """Cleans some shards. A bit is used again once all shards have been cleaned of it."""
        if not self._cleared and not self._sweeping:
            return
        if not self._sweeping:
            self._sweeping, self._cleared = self._cleared, 0
        for _ in range(_SWEPT_SHARDS):
            shard = self._shards[self._next_shard]
            for key in [key for key, bits in shard.items() if bits & self._sweeping]:
                bits = shard[key] & ~self._sweeping
                if bits:
                    shard[key] = bits
                else:
                    del shard[key]
            self._next_shard = (self._next_shard + 1) % _SHARDS
            if not self._next_shard:
                self._free += _single_bits(self._sweeping)
                self._sweeping = 0
                return


def _single_bits(bits: int) -> list[int]:
    found = []
    while bits:
        found.append(bits & -bits)
        bits &= bits - 1
    return found
