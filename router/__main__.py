"""`python -m router CONFIG.yaml key=value...`: a router, until SIGTERM."""

import argparse
import asyncio

import structlog

from router.config import RouterConfig
from router.host import host_router
from rpc.config import Loaded, load
from rpc.errors import ConfigError
from rpc.run import run
from rpc.telemetry import configure_logging

log = structlog.get_logger(__name__)


def main() -> None:
    """Reads the configuration and runs."""
    arguments = _parse_arguments()
    try:
        loaded = load(RouterConfig, arguments.config, arguments.overrides)
    except ConfigError as error:
        raise SystemExit(error.message) from None
    if arguments.print_config:
        print("\n".join(loaded.describe()))
        return
    _run(loaded)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m router", description="Routes requests to prefill and decode.")
    parser.add_argument("config", help="a YAML file, such as deploy/config/router.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as listen=127.0.0.1:7071")
    parser.add_argument("--print-config", action="store_true", help="print every value and where it is from, and stop")
    return parser.parse_args()


def _run(loaded: Loaded[RouterConfig]) -> None:
    config = loaded.value
    configure_logging(config.log.format, config.log.level, process="router")

    async def serve_until(stopping: asyncio.Event) -> None:
        async with host_router(config) as router:
            log.info("router listens", address=router.address, namespace=config.namespace)
            await stopping.wait()

    run(serve_until)


if __name__ == "__main__":
    main()
