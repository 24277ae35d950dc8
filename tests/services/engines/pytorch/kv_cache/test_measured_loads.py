"""A load is measured before the first request, also where loading seems dearer than computing."""

import pytest
from support.engines.embedded import Checkpoint

from services.engines.kv_events import KvTier
from services.engines.prompt import Prompt
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.kv_cache.tiers import jobs
from services.engines.pytorch.sequence import TokenSequence

BLOCK_BYTES = 12288


async def test_what_counts_as_a_load_before_the_first_request_is_one(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_LOAD_BASE_SECONDS", 1000.0)
    loaded: list[int] = []
    run = EngineCore._run

    def running(core: EngineCore, prompt: Prompt) -> TokenSequence:
        sequence = run(core, prompt)
        loaded.append(sequence.loaded_blocks)
        return sequence

    monkeypatch.setattr(EngineCore, "_run", running)
    options = {"kv_cache_bytes": 40 * BLOCK_BYTES, "tiers": {"host_bytes": 100 * BLOCK_BYTES}}
    async with llama.engine(**options) as engine:
        assert loaded == [0] * 4 + [0, 1] * 3
        assert engine._core.tiers is not None
        assert engine._core.tiers.rates.load_seconds(KvTier.HOST, 1) < 1000.0
