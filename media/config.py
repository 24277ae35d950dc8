"""The limits of media, and the sources that are allowed."""

import re
from ipaddress import ip_network
from typing import Literal, get_args

from pydantic import Field, field_validator

from runtime.config import Section

ImageType = Literal["image/png", "image/jpeg", "image/webp", "image/gif"]
_ALL_TYPES: tuple[ImageType, ...] = get_args(ImageType)

_HOST_PATTERN = re.compile(r"(\*|(\*\.)?[a-z0-9_.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")


class FetchConfig(Section):
    """Which URIs are fetched. By default only `data:`; `https:` needs an allowed host, `file:` an allowed folder."""

    timeout_seconds: float = Field(default=5.0, gt=0)  # in all: name resolution, connections, redirects, the body
    allowed_hosts: tuple[str, ...] = ()  # `example.org`, `*.example.org`, `*`; without `:port` it is 443
    allowed_folders: tuple[str, ...] = ()
    max_redirects: int = Field(default=3, ge=0)
    allowed_private_networks: tuple[str, ...] = ()  # such as `10.1.0.0/16`: clients can then reach hosts in it
    ca_file: str = ""  # trusted in place of the system's certificates

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        lowered = tuple(host.lower() for host in hosts)
        for host in lowered:
            if not _HOST_PATTERN.fullmatch(host):
                raise ValueError(f"{host!r} is not a host: expected example.org, *.example.org or * (and :port)")
        return lowered

    @field_validator("allowed_private_networks")
    @classmethod
    def _networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            ip_network(network)  # raises an error that names the fault
        return networks

    @field_validator("allowed_folders")
    @classmethod
    def _are_folders(cls, folders: tuple[str, ...]) -> tuple[str, ...]:
        return _folders(folders)


def _folders(folders: tuple[str, ...]) -> tuple[str, ...]:
    for folder in folders:
        if not folder.startswith("/") or ".." in folder.split("/"):
            raise ValueError(f"{folder!r} is not an absolute path without '..'")
    return folders


class MediaConfig(Section):
    """The limits of one media item."""

    max_bytes: int = Field(default=20 * 2**20, ge=1)
    # Above the upper bound Pillow warns. Decoding takes 4 bytes a pixel, of WebP 16, in each thread.
    max_pixels: int = Field(default=40_000_000, ge=1, le=89_478_485)
    max_aspect_ratio: float = Field(default=200.0, ge=1)  # processors scale the short side up, and the long one with it
    decode_threads: int = Field(default=2, ge=1)
    allowed_types: tuple[ImageType, ...] = Field(default=_ALL_TYPES, min_length=1)
    fetch: FetchConfig = FetchConfig()
    output_folders: tuple[str, ...] = ()  # below these, pictures and clips may be written instead of being sent

    @field_validator("output_folders")
    @classmethod
    def _are_folders(cls, folders: tuple[str, ...]) -> tuple[str, ...]:
        return _folders(folders)
