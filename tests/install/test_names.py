"""The names of our packages are common words: no other distribution may install them."""

from importlib import metadata
from pathlib import Path

from tools.structure import PACKAGES


def test_no_other_distribution_owns_one_of_the_names() -> None:
    owners = metadata.packages_distributions()
    own = {"baton-serving", "baton-client", "baton-http2"}
    assert {name: owners[name] for name in PACKAGES if not own.issuperset(owners.get(name, []))} == {}


def test_no_two_test_files_have_one_name() -> None:
    # Test folders are no packages: of two files of one name only the first would be collected.
    names = [path.name for path in Path(__file__).resolve().parents[1].rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
