"""Everything in this folder has the mark `costs`: a failure here is about speed, not about what is answered."""

from collections.abc import Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent


# First, for -m chooses by marks.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Marks the tests of this folder: pytest passes those of all folders."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("costs")
