"""Tiers of a model so small that its prompts are sooner computed: tests of what is loaded must not depend on speeds."""

import pytest

from services.engines.pytorch.kv_cache.tiers.directory import WriteRule
from services.engines.pytorch.kv_cache.tiers.jobs import Rates


@pytest.fixture
def always_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is written and loaded, however late: a busy machine may stop a copy for longer than a prompt takes."""
    monkeypatch.setattr(WriteRule, "may_write", lambda _: True)
    monkeypatch.setattr(Rates, "worth_loading", lambda _, host, disk: host + disk)
    monkeypatch.setattr(Rates, "patience_seconds", lambda _, blocks: 60.0)
