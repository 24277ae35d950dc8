"""`python -m router CONFIG.yaml key=value...`: runs a router until SIGTERM."""

import argparse
import asyncio
import sys
from functools import partial

import structlog

from baton.errors import ConfigError
from router.config import RouterConfig
from router.processes.supervisor import supervise
from runtime.config import Loaded, load
from runtime.garbage import exempt_living_objects, return_large_memory
from runtime.logs import configure_logging
from runtime.monitor import serve_monitor
from runtime.process import run

log = structlog.get_logger(__name__)


def main() -> None:
    """Exits with 0 after draining, 1 after a failure, 2 for a wrong configuration."""
    arguments = _parse_arguments()
    loaded = _load(arguments.config, arguments.overrides)
    if arguments.print_config:
        print("\n".join(loaded.describe()))
        return
    config = loaded.value.named()
    configure_logging(config.log.format, config.log.level, router_id=config.router_id, role="router")
    return_large_memory()
    run(partial(_serve if config.processes == 1 else supervise, config))


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m router", description="Routes requests to prefill and decode.")
    parser.add_argument("config", help="a YAML file, such as deploy/config/router.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as listen=127.0.0.1:7071")
    parser.add_argument("--print-config", action="store_true", help="print every value with its origin, and exit")
    return parser.parse_args()


def _load(path: str, overrides: list[str]) -> Loaded[RouterConfig]:
    try:
        return load(RouterConfig, path, overrides)
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        raise SystemExit(2) from None


async def _serve(config: RouterConfig, stopping: asyncio.Event) -> None:
    # Here: a supervisor of processes needs none of it.
    from router.server import host_router

    tls = config.metrics_tls.server_context("metrics_tls") if config.metrics_tls else None
    with serve_monitor(config.metrics_listen, tls) as monitor:
        async with host_router(config) as router:
            exempt_living_objects()  # what the import above made, too
            monitor.answer_with(router.report)
            log.info("router listens", address=router.address, namespace=config.namespace)
            await stopping.wait()


if __name__ == "__main__":
    main()
