"""Writing what was drawn where the client says, by the rules of reading: only below allowed folders."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from baton.errors import DeadlineExceeded, PermissionDenied, Unsupported
from media.config import MediaConfig
from media.sources import files, uri
from runtime.aio import timeout

Result = TypeVar("Result")


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
