"""The HTTP server of a process: Prometheus metrics at /metrics, health as JSON at /health."""

import asyncio
import json
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager, suppress
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, TypeAlias
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app

from baton.errors import ConfigError
from baton_http2.sockets.descriptors import limit
from runtime.telemetry.metrics import REGISTRY
from runtime.threads import start_thread

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

log = structlog.get_logger(__name__)

# The JSON object at /health; its `status` is SERVING or NOT_SERVING.
Report: TypeAlias = Mapping[str, object]

_REPORT_SECONDS = 2.0
_IDLE_SECONDS = 10.0  # for a TLS handshake, and for a request
# At once, and of all descriptors: less than what connections of clients leave free.
_MOST_CONNECTIONS, _LARGEST_PART = 64, 1 / 16


class MonitorServer:
    """The HTTP server of a process. `port` is the one it listens on; 0 if it does not listen."""

    def __init__(self) -> None:
        self.port = 0
        self._report: Callable[[], Report] = lambda: _not_serving("the process is starting")

    def answer_with(self, report: Callable[[], Report]) -> None:
        """Answers each later GET of /health with what `report` returns, called in the running event loop."""
        loop = asyncio.get_running_loop()
        self._report = lambda: _report_from(loop, report)

    def beside(self, metrics: "WSGIApplication") -> "WSGIApplication":
        """A WSGI application that serves /health, and everything else from `metrics`."""

        def answer(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
            if environ["PATH_INFO"] != "/health":
                return metrics(environ, start_response)
            report = self._report()
            line = "200 OK" if report["status"] == status(True) else "503 Service Unavailable"
            start_response(line, [("Content-Type", "application/json")])
            return [json.dumps(report).encode() + b"\n"]

        return answer


@contextmanager
def serve_monitor(
    listen: str, tls: ssl.SSLContext | None = None, registry: CollectorRegistry = REGISTRY
) -> Iterator[MonitorServer]:
    """Serves metrics and the health of this process over HTTP at `host:port` while the context is open.

    Port 0 is any free port; an empty `listen` serves nothing. Without a host it is 127.0.0.1. With `tls` it is HTTPS.
    Raises ConfigError if it cannot listen there.
    """
    monitor = MonitorServer()
    if not listen:
        yield monitor
        return
    try:
        server = _Server(listen, tls)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(f"metrics_listen: cannot listen on {listen!r}: {error}") from error
    server.set_app(monitor.beside(make_wsgi_app(registry)))
    monitor.port = server.server_port
    thread = start_thread(server.serve_forever, name="monitor")
    try:
        yield monitor
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def status(serving: bool) -> str:
    """The name of a status in `grpc.health.v1`."""
    return "SERVING" if serving else "NOT_SERVING"


class _Handler(WSGIRequestHandler):
    """Serves one connection in its own thread, without a log line for each request."""

    timeout = _IDLE_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """No-op."""


class _Server(ThreadingMixIn, WSGIServer):
    """Has a thread for each connection, of which there are few: the oldest one is ended for one too many."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, listen: str, tls: ssl.SSLContext | None) -> None:
        self._connections: dict[int, socket.socket] = {}
        self._lock = threading.Lock()
        host, _, port = listen.rpartition(":")
        address = host.strip("[]") or "127.0.0.1"
        self.address_family = socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)[0][0]
        super().__init__((address, int(port)), _Handler)
        if tls is not None:
            # The handshake is in the connection's thread: in the accepting one a silent peer would stop all others.
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._connections[id(request)] = request
            is_crowded = len(self._connections) > min(_MOST_CONNECTIONS, int(limit() * _LARGEST_PART))
            oldest = next(iter(self._connections.values())) if is_crowded else None
            if oldest is not None:
                del self._connections[id(oldest)]
        if oldest is not None:
            with suppress(OSError):
                socket.socket.shutdown(oldest, socket.SHUT_RDWR)  # its thread sees the end; TLS would wait for a peer
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(id(request), None)
        super().shutdown_request(request)

    def handle_error(self, _request: Any, client_address: Any) -> None:
        """A peer that leaves, or fails the handshake, is not an error of this process."""
        write = log.debug if isinstance(sys.exc_info()[1], OSError) else log.error
        write("monitor connection failed", peer=str(client_address), exc_info=True)


def _not_serving(problem: str) -> Report:
    return {"status": status(False), "problem": problem}


def _report_from(loop: asyncio.AbstractEventLoop, report: Callable[[], Report]) -> Report:
    """The report, called in the loop from a thread of the HTTP server; not serving if the loop does not answer."""

    async def ask() -> Report:
        return report()

    asking = ask()
    try:
        answer = asyncio.run_coroutine_threadsafe(asking, loop)
    except RuntimeError:  # The loop is closed.
        asking.close()
        return _not_serving("the process has ended")
    try:
        return answer.result(_REPORT_SECONDS)
    except futures.TimeoutError:
        answer.cancel()
        return _not_serving(f"the event loop has not answered for {_REPORT_SECONDS:g} s")
