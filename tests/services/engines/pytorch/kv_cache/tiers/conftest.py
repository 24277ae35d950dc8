"""Small models compute sooner than anything loads: in these tests what is in a tier is loaded all the same."""

import pytest

from services.engines.pytorch.kv_cache.tiers.jobs import Rates


@pytest.fixture(autouse=True)
def what_is_there_is_loaded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.path.stem not in ("test_directory", "test_rates"):
        monkeypatch.setattr(Rates, "worth_loading", lambda _rates, host, disk: host + disk)
