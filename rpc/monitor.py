"""What a process says over HTTP: its metrics at /metrics, and at /health whether it serves, and what, as JSON."""

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from prometheus_client import make_wsgi_app, start_http_server

from rpc.errors import ConfigError
from rpc.metrics import REGISTRY
from rpc.tls import TlsConfig

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

# What /health answers, as JSON: its `status` is SERVING or NOT_SERVING.
Report: TypeAlias = Mapping[str, object]

_PATIENCE_SECONDS = 2.0


class Monitor:
    """The HTTP server of a process. `port` is the one it has taken; 0 if it serves nothing."""

    def __init__(self) -> None:
        self.port = 0
        self._ask: Callable[[], Report] = lambda: _not_serving("it is still starting")

    def answer_with(self, report: Callable[[], Report]) -> None:
        """From now on every GET of /health calls `report`, in the event loop that runs here."""
        loop = asyncio.get_running_loop()
        self._ask = lambda: _ask_loop(loop, report)

    def beside(self, metrics: "WSGIApplication") -> "WSGIApplication":
        """The application that answers /health, and leaves the rest to `metrics`."""

        def answer(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
            if environ["PATH_INFO"] != "/health":
                return metrics(environ, start_response)
            report = self._ask()
            line = "200 OK" if report["status"] == status(True) else "503 Service Unavailable"
            start_response(line, [("Content-Type", "application/json")])
            return [json.dumps(report).encode() + b"\n"]

        return answer


@contextmanager
def serve_monitor(listen: str, tls: TlsConfig | None = None) -> Iterator[Monitor]:
    """Serves the metrics and the health of this process over HTTP at `host:port` while the context is open.

    Port 0 is any free one; an empty `listen` serves nothing. Without a host it is 127.0.0.1. With `tls` it is HTTPS,
    and with its `ca` only for callers with a certificate. Raises ConfigError if it cannot listen there.
    """
    monitor = Monitor()
    if not listen:
        yield monitor
        return
    host, _, port = listen.rpartition(":")
    try:
        address = host.strip("[]") or "127.0.0.1"
        server, thread = start_http_server(int(port), address, registry=REGISTRY, **_files(tls))
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(f"metrics_listen: cannot listen on {listen!r}: {error}") from error
    monitor.port = server.server_port
    server.set_app(monitor.beside(make_wsgi_app(REGISTRY)))
    try:
        yield monitor
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def status(serving: bool) -> str:
    """As `grpc.health.v1` calls it."""
    return "SERVING" if serving else "NOT_SERVING"


def _not_serving(problem: str) -> Report:
    return {"status": status(False), "problem": problem}


def _ask_loop(loop: asyncio.AbstractEventLoop, report: Callable[[], Report]) -> Report:
    """From a thread of the HTTP server's. A loop that does not answer is what a balancer wants to know of."""
    answer: futures.Future[Report] = futures.Future()

    def ask() -> None:
        try:
            answer.set_result(report())
        except Exception as error:
            answer.set_exception(error)
            raise

    try:
        loop.call_soon_threadsafe(ask)
    except RuntimeError:  # It is closed.
        return _not_serving("it has ended")
    try:
        return answer.result(_PATIENCE_SECONDS)
    except futures.TimeoutError:
        return _not_serving(f"its event loop has not answered for {_PATIENCE_SECONDS:g} s")


def _files(tls: TlsConfig | None) -> dict[str, Any]:
    if tls is None:
        return {}
    if tls.cert is None or tls.key is None:
        raise ConfigError("metrics_tls: a server needs cert and key")
    verifying = {} if tls.ca is None else {"client_cafile": str(tls.ca), "client_auth_required": True}
    return {"certfile": str(tls.cert), "keyfile": str(tls.key), **verifying}
