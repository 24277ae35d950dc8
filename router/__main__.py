"""`python -m router CONFIG.yaml key=value...`: runs a router until SIGTERM."""

import asyncio
from functools import partial

import structlog

from router.config import RouterConfig
from router.processes.supervisor import supervise
from runtime.garbage import exempt_living_objects, return_large_memory
from runtime.process import run
from runtime.settings import Process
from runtime.telemetry.logs import configure_logging
from runtime.telemetry.monitor import serve_monitor
from runtime.threads import switch_often

log = structlog.get_logger(__name__)


PROCESS = Process(
    command="python -m router",
    about="Routes requests to prefill and decode.",
    model=RouterConfig,
    prefix="BATON_ROUTER__",
    example="deploy/config/router.yaml",
)


def main() -> None:
    """Exits with 0 after draining, 1 after a failure, 2 for a wrong configuration."""
    loaded, is_printed = PROCESS.read()
    if is_printed:
        print("\n".join(loaded.describe()))
        return
    config = loaded.value.named()
    configure_logging(config.log.format, config.log.level, router_id=config.router_id, role="router")
    return_large_memory()
    switch_often()
    run(partial(_serve if config.processes == 1 else supervise, config))


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
