"""The names of a prompt's blocks, remembered or not."""

import random

import pytest

from engine_protocol.prefix_hash import block_hashes
from router.routing.prefix.kv_index import block_keys
from router.routing.prefix.prompt_blocks import PromptHasher

SOURCE = random.Random(1)
START = [SOURCE.randrange(1000) for _ in range(700)]


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 255, 256, 257, 511, 512, 700, 1000])
@pytest.mark.parametrize("block_tokens", [1, 16, 32])
def test_blocks_that_are_remembered_have_the_names_that_workers_tell(tokens: int, block_tokens: int) -> None:
    hasher = PromptHasher()
    for salt in ("", "tenant", ""):
        ids = (START + [SOURCE.randrange(1000) for _ in range(300)])[:tokens]
        assert list(hasher.keys(ids, block_tokens, salt)) == block_keys(block_hashes(ids, block_tokens, salt))


def test_a_hasher_forgets_what_was_not_used_for_long() -> None:
    hasher = PromptHasher()
    for seed in range(3000):
        ids = [seed * 64 + index for index in range(64)]
        assert list(hasher.keys(ids, 1)) == block_keys(block_hashes(ids, 1))
    assert len(hasher._newer) + len(hasher._older) <= 2 * 4096


def test_blocks_may_be_read_in_any_order() -> None:
    ids = START[: 17 * 16]
    names = block_keys(block_hashes(ids, 16))
    assert PromptHasher().keys(ids, 16)[::-1] == names[::-1]
    keys, read = PromptHasher().keys(ids, 16), []
    for key in keys:
        assert keys[len(keys) - 1] == names[-1]
        read.append(key)
    assert read == names
