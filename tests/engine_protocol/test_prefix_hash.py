"""All engines and routers use the same hash chain."""

from engine_protocol.prefix_hash import block_hashes
from services.engines.prompt import MediaSpan, Prompt
from services.engines.pytorch.kv_cache.blocks import HashChain
from services.engines.simulated.sequence import chain

IDS = tuple(range(1, 101))
MEDIA = (MediaSpan(20, 30, b"digest"),)


def test_the_simulated_and_the_embedded_engine_name_blocks_alike() -> None:
    for media in ((), MEDIA):
        prompt = Prompt(IDS, cache_salt="mine", media=media)
        embedded = HashChain("mine", 16, media).upto(IDS, len(IDS))
        assert chain(prompt, IDS, 16) == embedded == block_hashes(IDS, 16, "mine", media)
        assert len(embedded) == 6


def test_salts_and_media_change_the_names_of_the_blocks_from_where_they_stand() -> None:
    plain = block_hashes(IDS, 16)
    assert not set(plain) & set(block_hashes(IDS, 16, "mine"))
    seen = block_hashes(IDS, 16, "", MEDIA)
    assert [one == other for one, other in zip(plain, seen, strict=True)] == [True] + [False] * 5
