"""The index of KV blocks beside a model of plain sets."""

import random
import tracemalloc

import pytest

from router.routing.prefix.kv_index import KvIndex, block_keys

CHANGES = 100_000


class PlainIndex:
    """The expected content of the index, by the simplest means."""

    def __init__(self) -> None:
        self.blocks: dict[int, set[bytes]] = {}

    def match(self, prompt: list[bytes]) -> dict[int, int]:
        counts = {}
        for holder, blocks in self.blocks.items():
            count = next((at for at, each in enumerate(prompt) if each not in blocks), len(prompt))
            if count:
                counts[holder] = count
        return counts


def chain(seed: int, length: int) -> list[bytes]:
    return [random.Random(seed * 1009 + at).randbytes(16) for at in range(length)]


@pytest.mark.parametrize("holders", [8, 150])
def test_the_index_equals_a_model_of_sets_after_many_random_changes(holders: int) -> None:
    source = random.Random(holders)
    chains = [chain(seed, source.randrange(1, 40)) for seed in range(400)]
    index, plain = KvIndex[int](), PlainIndex()
    for number in range(CHANGES // 10):
        holder, prompt = source.randrange(holders), source.choice(chains)
        some = source.sample(prompt, source.randrange(len(prompt) + 1))
        match source.random():
            case chance if chance < 0.6:
                index.store(holder, block_keys(some))
                plain.blocks.setdefault(holder, set()).update(some)
            case chance if chance < 0.98:
                index.remove(holder, block_keys(some))
                plain.blocks.get(holder, set()).difference_update(some)
            case chance if chance < 0.99:
                index.clear(holder)
                plain.blocks.get(holder, set()).clear()
            case _:
                index.drop(holder)
                plain.blocks.pop(holder, None)
        if number % 20 == 0:
            prompt = source.choice(chains)
            assert index.match(block_keys(prompt)) == plain.match(prompt)
    assert set(index.holders) == set(plain.blocks)
    assert {each: index.num_blocks(each) for each in plain.blocks} == {
        each: len(blocks) for each, blocks in plain.blocks.items()
    }


def random_keys(source: random.Random, count: int) -> list[int]:
    return [source.getrandbits(64) for _ in range(count)]


def test_single_changes_of_many_blocks_are_all_kept() -> None:
    keys = random_keys(random.Random(1), CHANGES)
    index = KvIndex[str]()
    for start in range(0, len(keys), 64):
        index.store("a", keys[start : start + 64])
        index.remove("a", keys[start : start + 1])
    assert index.num_blocks("a") == len(keys) - len(range(0, len(keys), 64))
    assert index.match(keys[1:64]) == {"a": 63}
    assert index.match(keys[:64]) == {}


def test_memory_stays_bounded_while_blocks_come_and_go() -> None:
    source = random.Random(2)
    index = KvIndex[str]()
    tracemalloc.start()
    try:
        empty = tracemalloc.get_traced_memory()[0]
        window = [random_keys(source, 500) for _ in range(40)]
        for keys in window:
            index.store("a", keys)
        for _ in range(200):
            index.remove("a", window.pop(0))
            window.append(random_keys(source, 500))
            index.store("a", window[-1])
        used = tracemalloc.get_traced_memory()[0] - empty
    finally:
        tracemalloc.stop()
    assert index.num_blocks("a") == 20_000
    # The test itself has a list of the keys, of 8 bytes each.
    assert used <= (120 + 8) * 20_000


def test_a_cleared_holder_leaves_nothing_behind_for_the_next_one() -> None:
    source = random.Random(3)
    index = KvIndex[int]()
    keys = random_keys(source, 2000)
    for holder in range(300):
        index.store(holder, keys)
        index.clear(holder)
        assert index.match(keys[:1]) == {}
        index.store(holder, keys[:1])
        assert index.match(keys[:2]) == {holder: 1}
        index.drop(holder)
        assert index.match(keys[:1]) == {}
    # The bits of holders that have gone are used again.
    assert index.num_bits <= 300


def test_a_repeated_block_of_one_message_counts_once() -> None:
    index = KvIndex[str]()
    keys = block_keys([b"12345678", b"12345678", b"abcdefgh"])
    index.store("a", keys)
    assert index.num_blocks("a") == 2
    index.remove("a", keys)
    assert index.num_blocks("a") == 0
