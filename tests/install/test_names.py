"""The names of our packages are common words: no other distribution may install them."""

from importlib import metadata
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "name",
    [
        "router",
        "services",
        "discovery",
        "grammars",
        "media",
        "engine_protocol",
        "rpc",
        "runtime",
        "cli",
        "devtools",
        "baton_http2",
        "baton",
    ],
)
def test_no_other_distribution_owns_the_name(name: str) -> None:
    assert set(metadata.packages_distributions().get(name, [])) <= {"baton-serving", "baton-client", "baton-http2"}


def test_no_two_test_files_have_one_name() -> None:
    # Test folders are no packages: of two files of one name only the first would be collected.
    names = [path.name for path in Path(__file__).resolve().parents[1].rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
