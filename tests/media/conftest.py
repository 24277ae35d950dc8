"""Fixtures of the tests of media."""

from pathlib import Path

import pytest
from support.certificates import Authority, Pair
from support.images.site import Site


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The certificate authority of the servers that media are fetched from."""
    return Authority(tmp_path_factory.mktemp("authority"), "media")


@pytest.fixture(scope="session")
def certificate(authority: Authority) -> Pair:
    """For 127.0.0.1, localhost and two names that only a resolver of the tests knows."""
    return authority.issue("web", "localhost", "images.example.org", "cdn.example.org")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that media may be read from; what is beside it may not."""
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    return allowed


@pytest.fixture
def site(authority: Authority, certificate: Pair) -> Site:
    return Site(authority, certificate)
