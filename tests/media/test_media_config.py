"""The configuration of media."""

import pytest
from pydantic import ValidationError

from media.config import FetchConfig, MediaConfig


def test_nothing_is_fetched_by_default() -> None:
    fetch = MediaConfig().fetch
    assert (fetch.allowed_hosts, fetch.allowed_folders, fetch.allowed_private_networks) == ((), (), ())


def test_hosts_are_compared_in_lower_case() -> None:
    assert FetchConfig(allowed_hosts=("Images.Example.ORG",)).allowed_hosts == ("images.example.org",)


@pytest.mark.parametrize(
    "host", ["", "https://example.org", "example.org/images", "*example.org", "a.*.org", "example.org:x", "a b", "u@b"]
)
def test_a_host_that_is_none_is_refused(host: str) -> None:
    with pytest.raises(ValidationError, match="is not a host"):
        FetchConfig(allowed_hosts=(host,))


@pytest.mark.parametrize("folder", ["", "images", "./images", "/images/../etc"])
def test_a_folder_that_is_not_absolute_is_refused(folder: str) -> None:
    with pytest.raises(ValidationError, match="is not an absolute path"):
        FetchConfig(allowed_folders=(folder,))


@pytest.mark.parametrize("network", ["intranet", "10.0.0.0/33", "10.0.0.1/8"])
def test_a_network_that_is_none_is_refused(network: str) -> None:
    with pytest.raises(ValidationError):
        FetchConfig(allowed_private_networks=(network,))


def test_a_type_that_cannot_be_read_cannot_be_allowed() -> None:
    with pytest.raises(ValidationError):
        MediaConfig.model_validate({"allowed_types": ["image/tiff"]})


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        MediaConfig.model_validate({"max_byte": 1})
