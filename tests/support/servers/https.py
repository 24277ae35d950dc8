"""A real HTTPS server on 127.0.0.1 that answers exactly what a test tells it to."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from support.certificates import Pair

# What comes back for a path: the bytes on the wire, or a function that writes them.
Answer = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Web:
    """A running server. `requests` are the heads of all requests so far."""

    port: int
    requests: list[str] = field(default_factory=list)


@asynccontextmanager
async def web(certificate: Pair, answers: Mapping[str, Answer]) -> AsyncIterator[Web]:
    """Serves `answers`, by path, for as long as the context is open."""
    running = Web(0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            running.requests.append(head)
            answer = answers[head.split()[1]]
            if isinstance(answer, bytes):
                writer.write(answer)
            else:
                await answer(writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has gone, as some tests want it to
        finally:
            writer.close()

    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate.cert, certificate.key)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    running.port = server.sockets[0].getsockname()[1]
    try:
        yield running
    finally:
        server.close()


def ok(content: bytes, *headers: str) -> bytes:
    """A complete answer that carries `content`."""
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(content)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def redirect(location: str, status: int = 302) -> bytes:
    """A redirect."""
    return f"HTTP/1.1 {status} Elsewhere\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()
