"""benchmarks/results/deploy.md says of every file under deploy/ how it was executed."""

import re
from fnmatch import fnmatch

from support.manifests import DEPLOY, ROOT

GENERATED = {"descriptors.binpb"}


def test_every_file_has_a_row() -> None:
    table = (ROOT / "benchmarks" / "results" / "deploy.md").read_text()
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    patterns = [pattern for row in rows for pattern in re.findall(r"`([^`]+)`", row)]
    files = [path for path in DEPLOY.rglob("*") if path.is_file() and path.name not in GENERATED]
    names = [str(path.relative_to(DEPLOY)) for path in files]
    assert [name for name in names if not any(fnmatch(name, pattern) for pattern in patterns)] == []
    assert [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in names)] == []
