"""Fetches media from a server on 127.0.0.1 that answers what a test tells it to."""

from collections.abc import Mapping
from typing import Any

from support.certificates import Authority, Pair
from support.servers.https import Answer, Web, web

from media.config import FetchConfig, MediaConfig
from media.content import CheckedMedia, MediaItem
from media.loader import MediaLoader
from media.sources.addresses import Resolver

LOOPBACK = ("127.0.0.1/32",)


class Site:
    """A server with its answers, and what fetching from it takes."""

    def __init__(self, authority: Authority, certificate: Pair) -> None:
        self._authority = authority
        self._certificate = certificate
        self.requests: list[str] = []

    async def load(
        self,
        answers: Mapping[str, Answer],
        uri: str = "https://127.0.0.1:PORT/a.png",
        *,
        resolver: Resolver | None = None,
        max_bytes: int = 2**20,
        **fetch: object,
    ) -> CheckedMedia:
        """Loads `uri` while a server gives `answers`. PORT is the server's, in the URI, in answers and in settings."""
        answers = dict(answers)
        async with web(self._certificate, answers) as server:
            for path, answer in answers.items():
                if isinstance(answer, bytes):
                    answers[path] = answer.replace(b"PORT", str(server.port).encode())
            self.requests = server.requests
            config = MediaConfig(max_bytes=max_bytes, fetch=self._settings(server, fetch))
            async with MediaLoader(config, resolver) as loader:
                return await loader.load(MediaItem("media[0]", uri.replace("PORT", str(server.port))))

    def _settings(self, server: Web, fetch: Mapping[str, object]) -> FetchConfig:
        settings: dict[str, Any] = {
            "allowed_hosts": ("127.0.0.1:PORT",),
            "allowed_private_networks": LOOPBACK,
            "ca_file": str(self._authority.ca),
            **fetch,
        }
        hosts = [host.replace("PORT", str(server.port)) for host in settings["allowed_hosts"]]
        return FetchConfig.model_validate({**settings, "allowed_hosts": hosts})
