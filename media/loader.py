"""From a request's media item to checked content, the one way in. What was drawn, to allowed folders."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from typing_extensions import Self

from baton.errors import DeadlineExceeded, PermissionDenied, Unsupported
from media.config import MediaConfig
from media.content import (
    CheckedMedia,
    MediaItem,
    agreed_type,
    check_declared,
)
from media.image import check_image
from media.sources import files, uri
from media.sources.addresses import Resolver, SystemResolver
from media.sources.https import HttpsFetcher
from runtime.aio import timeout

Result = TypeVar("Result")


async def load(item: MediaItem, config: MediaConfig) -> CheckedMedia:
    """Loads a single item; see `MediaLoader.load`. To load several, keep a MediaLoader."""
    async with MediaLoader(config) as loader:
        return await loader.load(item)


class MediaLoader:
    """Loads media within the limits of a configuration, and decodes in threads of its own, a bounded number at a time.

        async with MediaLoader(config) as loader:
            media = await loader.load(MediaItem("media[0]", "data:image/png;base64,..."))

    Raises ConfigError when it is made, if the certificates to trust cannot be read.
    """

    def __init__(self, config: MediaConfig, resolver: Resolver | None = None) -> None:
        self._config = config
        self._https: HttpsFetcher | None = None
        if config.fetch.allowed_hosts:
            self._https = HttpsFetcher(
                config.fetch, resolver or SystemResolver(), accept=config.allowed_types, max_bytes=config.max_bytes
            )
        self._threads = ThreadPoolExecutor(config.decode_threads, thread_name_prefix="media")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        # Outside the loop, because a decode that has been given up still runs to its end.
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    @property
    def schemes(self) -> tuple[str, ...]:
        """The schemes of URIs that are fetched, as configured."""
        https = ("https",) if self._https else ()
        file = ("file",) if self._config.fetch.allowed_folders else ()
        return ("data", *https, *file)

    async def load(self, item: MediaItem) -> CheckedMedia:
        """Loads the item's content and checks it: type, completeness, size, one frame.

        Raises InvalidRequest naming the field that is wrong, Unsupported for a type or a scheme that is not accepted,
        PermissionDenied for a host, address or folder that may not be read, MediaUnavailable and DeadlineExceeded when
        fetching fails. No message tells of content, nor of hosts and addresses that the client has not named.
        """
        check_declared(item, self._config.allowed_types)
        match item.source:
            case bytes() as content:
                return await self._check(item, content)
            case str() as address:
                return await self._load_from(address, item)

    async def _load_from(self, address: str, item: MediaItem) -> CheckedMedia:
        field = item.source_field
        match uri.scheme(address, field, self.schemes):
            case "data":
                found = await self._in_thread(lambda: uri.decode_data(address, field, self._config.max_bytes))
                declared = replace(item, mime_type=agreed_type(item, found.mime_type))
                return await self._check(declared, found.content)
            case "https" if self._https is not None:
                return await self._check(item, await self._https.fetch(address, field))
            case "file" if self._config.fetch.allowed_folders:
                return await self._check(item, await self._read_file(address, field))
            case scheme:
                raise Unsupported(f"{field}: {scheme}: is not enabled; enabled are {uri.listed(self.schemes)}")

    async def _read_file(self, address: str, field: str) -> bytes:
        fetch, max_bytes = self._config.fetch, self._config.max_bytes
        try:
            # A network file system may never answer.
            async with timeout(fetch.timeout_seconds):
                return await self._in_thread(
                    lambda: files.read(address, field, folders=fetch.allowed_folders, max_bytes=max_bytes)
                )
        except TimeoutError:
            raise DeadlineExceeded(f"{field}: not read within {fetch.timeout_seconds:g} s") from None

    async def _check(self, item: MediaItem, content: bytes) -> CheckedMedia:
        return await self._in_thread(lambda: check_image(item, content, self._config))

    async def _in_thread(self, function: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


class MediaStore:
    """Writes files below the configured folders."""

    def __init__(self, config: MediaConfig) -> None:
        self._folders = config.output_folders
        self._seconds = config.fetch.timeout_seconds

    async def check(self, address: str, field: str) -> None:
        """Raises Unsupported for another scheme than `file:`, PermissionDenied where nothing may be written, and
        InvalidRequest where there is no folder.
        """
        if uri.scheme(address, field, ("file",)) != "file":
            raise Unsupported(f"{field}: expected file:, a folder")
        if not self._folders:
            raise PermissionDenied(f"{field}: nothing may be written; the setting is media.output_folders")
        await self._in_thread(field, partial(files.check_folder, address, field, folders=self._folders))

    async def write(self, address: str, field: str, name: str, content: bytes) -> str:
        """Writes a file into the folder of this address, and returns its URI. Raises the errors of `files.write`, and
        DeadlineExceeded.
        """
        writing = partial(files.write, address, field, folders=self._folders, name=name, content=content)
        return await self._in_thread(field, writing)

    async def _in_thread(self, field: str, function: Callable[[], Result]) -> Result:
        try:
            # A network file system may never answer.
            async with timeout(self._seconds):
                return await asyncio.to_thread(function)
        except TimeoutError:
            raise DeadlineExceeded(f"{field}: not written within {self._seconds:g} s") from None
