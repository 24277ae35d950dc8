"""The block pool's bookkeeping: which blocks are allocated, and which prefixes stay cached."""

from collections.abc import Sequence

from engine_protocol.prefix_hash import block_hash, root_hash
from services.engines.pytorch.kv_cache.blocks import NULL_BLOCK, BlockPool, HashChain
from services.engines.pytorch.kv_cache.events import BlockRemoved, BlockStored

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def test_the_block_for_padding_is_never_handed_out() -> None:
    assert NULL_BLOCK not in BlockPool(5).allocate(4)


def test_neighbouring_blocks_are_handed_out_together() -> None:
    pool = BlockPool(10)
    scattered = pool.allocate(9)
    pool.release([scattered[i] for i in (6, 1, 4, 2)])
    assert pool.allocate(4) == [2, 3, 5, 7]


def test_a_released_block_is_found_again_until_it_is_reused() -> None:
    pool = BlockPool(3)
    [first, second] = pool.allocate(2)
    pool.store(first, A)
    pool.release([first, second])
    assert pool.match([A]) == [first]
    assert pool.allocate(2) == [second, first]
    assert pool.match([A]) == []


def test_the_least_recently_used_block_is_reused_first() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for block, link in zip(blocks, (A, B, C), strict=True):
        pool.store(block, link)
        pool.release([block])
    pool.share([blocks[0]])
    pool.release([blocks[0]])
    assert pool.allocate(1) == [blocks[1]]


def test_the_end_of_a_prefix_is_reused_before_its_beginning() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.store(blocks[0], A)
    pool.store(blocks[1], B)
    pool.release(blocks)
    pool.allocate(1)
    assert pool.match([A, B]) == [blocks[0]]


def test_a_shared_block_is_free_when_its_last_user_leaves() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.store(block, A)
    pool.share([block])
    pool.release([block])
    assert pool.used == 1
    pool.release([block])
    assert pool.used == 0


class _Lower:
    """A lower tier that notes what leaves the pool, part by part."""

    def __init__(self) -> None:
        self.demoted: list[int] = []

    def demote(self, evicted: Sequence[tuple[int, bytes]]) -> Sequence[bytes]:
        self.demoted.append(len(evicted))
        return ()

    def stored(self, block_hash: bytes) -> None: ...

    def lose(self, hashes: Sequence[bytes]) -> int:
        return 0

    def leave_first(self, hashes: Sequence[bytes]) -> None: ...


def test_a_sequence_that_grows_waits_for_few_blocks_to_leave_however_large_the_pool_is() -> None:
    pool, lower = BlockPool(10_001), _Lower()
    for block in (blocks := pool.allocate(10_000)):
        pool.store(block, block.to_bytes(16, "big"))
    pool.release(blocks)
    pool.lower = lower
    pool.empty_ahead(400, (), 400)
    lower.demoted.clear()
    for _ in range(1000):
        pool.allocate(1)
    assert 0 < max(lower.demoted) <= 16


def test_a_listener_hears_what_enters_and_leaves_the_cache() -> None:
    heard: list[object] = []
    pool = BlockPool(2, heard.append)
    [block] = pool.allocate(1)
    pool.store(block, A)
    pool.release([block])
    pool.allocate(1)
    assert heard == [BlockStored(A), BlockRemoved(A)]


def test_content_that_is_known_already_is_stored_once() -> None:
    heard: list[object] = []
    pool = BlockPool(3, heard.append)
    [first, second] = pool.allocate(2)
    pool.store(first, A)
    pool.store(second, A)
    pool.release([first, second])
    assert heard == [BlockStored(A)]
    assert pool.match([A]) == [first]


def test_a_hash_names_all_tokens_before_the_block_too() -> None:
    one, other = HashChain("", 2), HashChain("", 2)
    assert one.upto([1, 2, 3, 4], 4)[0] == other.upto([1, 2, 9, 4], 4)[0]
    assert one.upto([1, 2, 3, 4], 4)[1] != other.upto([1, 2, 9, 4], 4)[1]
    assert one.upto([1, 2, 3, 4], 4)[1] != block_hash(root_hash(""), [3, 4])


def test_a_chain_covers_full_blocks_only() -> None:
    assert len(HashChain("", 4).upto(list(range(11)), 11)) == 2


def test_chains_of_different_salts_never_meet() -> None:
    assert HashChain("x", 2).upto([1, 2], 2) != HashChain("y", 2).upto([1, 2], 2)
