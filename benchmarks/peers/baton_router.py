"""Baton's router in a process of its own, of any interpreter: `PYTHON -I baton_router.py JSON`.

The argument names a checkout, whether its modules go before installed ones, the server, the receiver of spans, and the
workers' records. Prints what runs, as one line of JSON, once the router serves; ends with its input. It imports
nothing of the other benchmarks, since an environment may have a Baton of its own.
"""

import asyncio
import json
import os
import platform
import sys
import sysconfig
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any


async def serve(asked: dict[str, Any]) -> None:
    """Serves until the input ends."""
    from discovery.memory import MemoryRegistry
    from discovery.record import WorkerRecord
    from router.config import RouterConfig
    from router.server import host_router
    from runtime.garbage import exempt_living_objects

    config = RouterConfig.model_validate(
        {
            "listen": "127.0.0.1:0",
            "metrics_listen": "127.0.0.1:0",
            "drain_seconds": 0,
            "server": asked["server"],
            "routing": {"policy": asked["policy"]},
            # With everything on: a limit that admission counts against, and a tenth of the requests traced.
            "admission": {"max_running_per_worker": 4096},
            "tracing": {"endpoint": asked["spans"], "sample_ratio": 0.1},
            # Workers that share a core with the client answer late, and are not lost.
            "probe": {"timeout_seconds": 20, "hung_seconds": 60},
        }
    )
    registry = MemoryRegistry("benchmark")
    async with AsyncExitStack() as stack:
        for record in asked["records"]:
            await stack.enter_async_context(registry.register(WorkerRecord.from_json(record.encode())))
        router = await stack.enter_async_context(host_router(config, registry))
        while sum(not worker.problem for worker in router.cluster.workers) < len(asked["records"]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        exempt_living_objects()  # as `python -m router`, which imports its modules late, too
        print(json.dumps({"address": router.address, "runs": _runs()}), flush=True)
        await asyncio.to_thread(sys.stdin.buffer.read)


def _runs() -> str:
    """The interpreter and its build, and whether modules of Baton are compiled."""
    options = str(sysconfig.get_config_var("CONFIG_ARGS") or "")
    if "--enable-optimizations" in options:
        build = "with PGO"
    elif "--prefix=/usr'" in options:
        # Debian builds with PGO, and takes it out of what sysconfig says.
        build = "of the distribution (Debian's has PGO)"
    else:
        build = "without PGO"
    names = ("router", "rpc", "baton", "baton_http2", "engine_protocol", "runtime")
    ours = [module for name, module in sys.modules.items() if name.partition(".")[0] in names]
    compiled = sum(str(getattr(module, "__file__", "") or "").endswith((".so", ".pyd")) for module in ours)
    what = f"{compiled} of {len(ours)} modules compiled" if compiled else "no compiled modules"
    return f"{platform.python_implementation()} {platform.python_version()} {build}, {what}"


def main() -> None:
    """Runs what the argument asks for."""
    asked = json.loads(sys.argv[1])
    sys.path.insert(0 if asked["checkout_first"] else len(sys.path), asked["checkout"])
    # Log lines are written, as in production, and not read.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    import uvloop

    from runtime.garbage import collect_rarely

    try:
        from runtime.telemetry.logs import configure_logging
    except ImportError:  # an earlier Baton's
        from runtime.logs import configure_logging  # type: ignore[import-not-found,no-redef]

    configure_logging("json", "info")
    collect_rarely()
    uvloop.run(serve(asked))


if __name__ == "__main__":
    sys.path = [entry for entry in sys.path if entry != str(Path(__file__).resolve().parent)]
    main()
