"""docs/features.md is what the marks of the tests say, and says nothing without a test."""

from pathlib import Path

import pytest
from support.manifests import ROOT

from tools.feature_table import PAGE, page, shown_features


def test_the_page_is_generated_from_the_tests() -> None:
    assert PAGE.read_text() == page(shown_features()), "run `python tools/feature_table.py`"


def test_every_mark_is_of_a_test_that_exists() -> None:
    marks = shown_features()
    assert len(marks) > 40
    assert all(mark.test.startswith("test_") and (ROOT / mark.path).is_file() for mark in marks)


def test_a_mark_of_an_unknown_engine_is_refused(tmp_path: Path) -> None:
    text = '@pytest.mark.{}("x", engine="abacus", facade="grpc")\ndef test_x() -> None: ...\n'.format("feature")
    (tmp_path / "test_x.py").write_text(text)
    with pytest.raises(ValueError, match="abacus"):
        shown_features(tmp_path)
