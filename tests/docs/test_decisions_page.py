"""docs/decisions.md lists every decision."""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def anchor(heading: str) -> str:
    """As GitHub names a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_index_has_every_heading_and_no_other() -> None:
    listed = re.findall(r"^\* \[(.*)\]\((decisions/.*)\)$", (DOCS / "decisions.md").read_text(), re.M)
    headings = [
        (heading, f"decisions/{page.name}#{anchor(heading)}")
        for page in (DOCS / "decisions").glob("*.md")
        for heading in re.findall(r"^## (.*)$", page.read_text(), re.M)
    ]
    missing = [f"* [{heading}]({link})" for heading, link in headings if (heading, link) not in listed]
    assert sorted(listed) == sorted(headings), "\n".join(["lines to add to docs/decisions.md:", *missing])
