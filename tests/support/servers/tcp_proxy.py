"""A TCP proxy on 127.0.0.1 in front of a server, which cuts or freezes the connections of one client."""

import asyncio
import contextlib

from typing_extensions import Self

from runtime.aio import TaskGroup


class TcpProxy:
    """Passes bytes on to `target` (host:port) until told otherwise: `async with TcpProxy(target) as proxy: ...`."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._target_port = int(port)
        self.accepted = 0  # connections so far
        self._server: asyncio.Server | None = None
        self._port = 0
        self._connections: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()

    @property
    def address(self) -> str:
        """host:port of the proxy; it stays the same over `cut` and `restore`."""
        return f"127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        await self.restore()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cut()
        self._flowing.set()
        if self._serving:
            await asyncio.wait(self._serving)

    async def cut(self) -> None:
        """Ends every connection and refuses new ones."""
        if self._server is not None:
            self._server.close()
        for writer in tuple(self._connections):
            writer.transport.abort()
        self._server = None

    async def restore(self) -> None:
        """Passes everything on (again)."""
        self._flowing.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
            self._port = self._server.sockets[0].getsockname()[1]

    def freeze(self) -> None:
        """Keeps connections open, old and new, but forwards nothing, like a hung peer."""
        self._flowing.clear()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:
            # It was in the kernel's queue, or on its way here, when everything was cut.
            writer.transport.abort()
            return
        self.accepted += 1
        self._connections.add(writer)
        serving = asyncio.ensure_future(self._serve(reader, writer))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                upstream_reader, upstream_writer = await asyncio.open_connection(self._host, self._target_port)
                self._connections.add(upstream_writer)
                async with TaskGroup() as group:
                    group.create_task(self._pass_on(reader, upstream_writer))
                    group.create_task(self._pass_on(upstream_reader, writer))
                self._connections.discard(upstream_writer)
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(65536):
                await self._flowing.wait()
                writer.write(chunk)
                await writer.drain()
        writer.close()
