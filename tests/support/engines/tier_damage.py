"""Accidents of blocks in the KV tiers: each damages a random block of a tier as something in the field would."""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.engines.kv_events import KvTier
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.pytorch.kv_cache.tiers.tiers import KvTiers
from services.engines.seals import SEAL_BYTES, BlockContents, Sealer

BLOCK_BYTES = 12288
SLOT_BYTES = BLOCK_BYTES + 4096
BLOCK_TOKENS = 16


@dataclass(slots=True)
class Stored:
    """A block in a tier: its content and seal, which are written back after they are damaged."""

    contents: BlockContents
    data: bytearray
    seal: bytearray
    another: tuple[bytes, bytes]  # content and seal of another block of the tier


Damage = Callable[[Stored, Sealer, random.Random], None]


def flipped_bit(stored: Stored, sealer: Sealer, chance: random.Random) -> None:
    _flip(stored.data, chance)


def torn_write(stored: Stored, sealer: Sealer, chance: random.Random) -> None:
    """The rest of a block is that of the slot's earlier block."""
    rest = chance.randrange(0, len(stored.data), 64)
    stored.data[rest:] = bytes(chance.randrange(1, 256) for _ in range(64)) * ((len(stored.data) - rest) // 64)


def killed_writer(stored: Stored, sealer: Sealer, chance: random.Random) -> None:
    """The data are there, and the seal, which is written last, is not."""
    stored.seal[:] = bytes(SEAL_BYTES)


def killed_writer_of_a_used_slot(stored: Stored, sealer: Sealer, chance: random.Random) -> None:
    """The data are there, and the seal is that of the slot's earlier block."""
    stored.seal[:] = stored.another[1]


def lost_write(stored: Stored, sealer: Sealer, chance: random.Random) -> None:
    """A slot that was never written."""
    stored.data[:] = bytes(len(stored.data))
    stored.seal[:] = bytes(SEAL_BYTES)


def damaged_seal(stored: Stored, sealer: Sealer, chance: random.Random) -> None:
    _flip(stored.seal, chance)


def stale_epoch(stored: Stored, sealer: Sealer, chance: random.Random) -> None:
    """A seal of an earlier process, right in everything else."""
    stored.seal[:] = _sealed_by(stored, sealer._layout, chance.getrandbits(64))


def wrong_layout(stored: Stored, sealer: Sealer, chance: random.Random) -> None:
    """A seal of another model, right in everything else."""
    stored.seal[:] = _sealed_by(stored, bytes(8), sealer._epoch)


def another_block(stored: Stored, sealer: Sealer, chance: random.Random) -> None:
    """A block, with its seal, in the place of another one."""
    stored.data[:], stored.seal[:] = stored.another


DAMAGES: Sequence[Damage] = (
    flipped_bit,
    torn_write,
    killed_writer,
    killed_writer_of_a_used_slot,
    lost_write,
    damaged_seal,
    stale_epoch,
    wrong_layout,
    another_block,
)


def _flip(memory: bytearray, chance: random.Random) -> None:
    memory[chance.randrange(len(memory))] ^= 1 << chance.randrange(8)


def _sealed_by(stored: Stored, layout: bytes, epoch: int) -> bytes:
    sealer = Sealer.__new__(Sealer)
    sealer._layout, sealer._epoch = layout, epoch
    return sealer.seal(stored.contents, int.from_bytes(stored.seal[40:48], "little"))


def settle(core: EngineCore) -> KvTiers:
    """Waits until no block is on its way down."""
    tiers = core.tiers
    assert tiers is not None
    tiers.settle(range(1000))
    tiers._movers.writes.wait(tiers._writes, 60)
    tiers.poll()
    return tiers


async def damage_one(engine: PyTorchEngine, tier: KvTier, damage: Damage, chance: random.Random) -> bool:
    """Damages a block of a tier, between two steps; False if it has not two blocks."""

    def run(core: EngineCore) -> bool:
        tiers = settle(core)
        slots = list(tiers.directory._slots(tier).slot_of.items())
        if len(slots) < 2:
            return False
        (block_hash, slot), (_, other) = chance.sample(slots, 2)
        read, write = _access(tiers, tier)
        data, seal = read(slot)
        stored = Stored(BlockContents(block_hash, BLOCK_TOKENS), bytearray(data), bytearray(seal), read(other))
        damage(stored, tiers.sealer, chance)
        write(slot, bytes(stored.data), bytes(stored.seal))
        return True

    return await engine._loop.call(run)


Read = Callable[[int], tuple[bytes, bytes]]
Write = Callable[[int, bytes, bytes], None]


def _access(tiers: KvTiers, tier: KvTier) -> tuple[Read, Write]:
    return _access_host(tiers) if tier is KvTier.HOST else _access_disk(tiers)


def _access_host(tiers: KvTiers) -> tuple[Read, Write]:
    def read(slot: int) -> tuple[bytes, bytes]:
        return bytes(tiers.host.memory.read([slot])[0]), tiers.host.seal(slot)

    def write(slot: int, data: bytes, seal: bytes) -> None:
        tiers.host.memory.read([slot])[0][:] = data
        tiers.host.set_seal(slot, seal)

    return read, write


def _access_disk(tiers: KvTiers) -> tuple[Read, Write]:
    """Through the file's descriptor: it has no name."""
    assert tiers.disk is not None
    path = f"/proc/self/fd/{tiers.disk._file}"

    def read(slot: int) -> tuple[bytes, bytes]:
        with open(path, "rb", buffering=0) as file:
            content = os.pread(file.fileno(), SLOT_BYTES, slot * SLOT_BYTES)
        return content[:BLOCK_BYTES], content[BLOCK_BYTES : BLOCK_BYTES + SEAL_BYTES]

    def write(slot: int, data: bytes, seal: bytes) -> None:
        with open(path, "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), data + seal, slot * SLOT_BYTES)

    return read, write
