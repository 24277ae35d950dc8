"""The names of our packages are common words: nobody else may have them."""

from importlib import metadata

import pytest


@pytest.mark.parametrize("name", ["router", "services", "discovery", "rpc", "client", "baton"])
def test_no_other_distribution_owns_the_name(name: str) -> None:
    assert set(metadata.packages_distributions().get(name, [])) <= {"baton-serving"}
