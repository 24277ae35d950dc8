"""docs/api.md is what tools/api_docs.py writes now, and every link in it leads somewhere."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text()


def test_the_page_is_fresh(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "tools" / "api_docs.py"), str(tmp_path / "api.md")]
    subprocess.run(script, check=True, timeout=60)
    assert (tmp_path / "api.md").read_text() == PAGE, "run `make docs`"


def test_every_link_leads_to_a_section() -> None:
    sections = {title.lower() for title in re.findall(r"^###? (\w+)$", PAGE, re.M)}
    assert set(re.findall(r"\]\(#(\w+)\)", PAGE)) <= sections


def test_comments_of_the_protos_are_on_the_page() -> None:
    assert "Streams an answer: Started, tokens, Finished." in PAGE
    assert "Nucleus: the smallest set of tokens" in PAGE
    assert "map of uint32 to float" in PAGE


def test_help_explains_and_writes_nothing(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "tools" / "api_docs.py"), "--help"]
    shown = subprocess.run(script, check=True, timeout=60, cwd=tmp_path, capture_output=True, text=True).stdout
    assert "docs/api.md" in shown
    assert list(tmp_path.iterdir()) == []
