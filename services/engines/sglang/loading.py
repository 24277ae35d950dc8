"""Starts SGLang's engine with the arguments in effect, and ends it. What SGLang takes of its process is put back."""

import asyncio
import atexit
import importlib
import json
import logging
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from baton.errors import ConfigError, EngineFailed
from services.engines.external.argument_places import MergedArguments
from services.engines.external.event_reader import EventEndpoints
from services.engines.external.package import one_line
from services.engines.external.surroundings import free_ports
from services.engines.sglang.config import SglangArguments, SglangConfig
from services.engines.sglang.inside.processes import run_detokenizer, run_scheduler
from services.engines.sglang.inside.scheduler import CLOSING_SECONDS
from services.engines.sglang.package import SglangPackage

ResolvedSglang = MergedArguments[SglangArguments]

_METRICS = "PROMETHEUS_MULTIPROC_DIR"
# SGLang keeps a few tokens of a context for itself.
_SPARE_TOKENS = 8
_END_SECONDS = 10.0
# SGLang reads a part of its settings from the environment, which two engines of one process share.
_STARTING = threading.Lock()


@dataclass(frozen=True, slots=True)
class StartedSglang:
    """An engine, its processes, the folder of its metrics if it keeps some, the size of its pool in tokens, and
    whether it has a prefix cache: SGLang switches it off for some models and kernels."""

    llm: Any
    processes: Sequence[BaseProcess]
    metrics_folder: str
    pool_tokens: int
    has_prefix_cache: bool


def on_cpus(args: SglangArguments) -> bool:
    """True if the engine computes on CPUs: SGLANG_USE_CPU_ENGINE=1 must be set then before SGLang is imported."""
    return args.device == "cpu"


def side(config: SglangConfig, roles: Sequence[str]) -> str:
    """SGLang's disaggregation_mode."""
    if config.whole_requests:
        return "null"
    return "prefill" if "prefill" in roles else "decode"


@dataclass(frozen=True, slots=True)
class SglangStart:
    """The inputs of an engine's start, beside the arguments in effect."""

    roles: Sequence[str]
    context_tokens: int
    events: EventEndpoints | None


def start(
    config: SglangConfig, effective: ResolvedSglang, package: SglangPackage, starting: SglangStart
) -> StartedSglang:
    """Starts the engine, which blocks for a minute or more. Raises ConfigError for arguments that SGLang refuses."""
    arguments = _arguments(config, effective, starting)
    with _Launch(_variables(config, effective.value)) as launch:
        llm: Any = object.__new__(_engine_class(package, launch))
        try:
            server_args = package.server_args(**arguments)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"sglang {package.version} does not accept the arguments: {one_line(error)}") from error
        try:
            llm.__init__(server_args=server_args)
        except Exception as error:  # whatever it is, its processes must not stay
            launch.end()
            _kill(launch.processes)
            raise EngineFailed(f"sglang {package.version} cannot load {config.model}: {one_line(error)}") from error
        finally:
            # It would end all children of this process.
            atexit.unregister(llm.shutdown)
    llm.tokenizer_manager._subprocess_watchdog.stop()
    info = llm._scheduler_init_result.scheduler_infos[0]
    folder = launch.metrics_folder if config.metrics else ""
    has_cache = not llm.server_args.disable_radix_cache
    return StartedSglang(llm, launch.processes, folder, int(info["max_total_num_tokens"]), has_cache)


class _Launch:
    """The part of a start in which SGLang starts processes. They load the model after it, while others may start."""

    def __init__(self, variables: dict[str, str]) -> None:
        self._variables = variables
        self._stack = ExitStack()
        self.processes: list[BaseProcess] = []
        self.metrics_folder = ""

    def __enter__(self) -> "_Launch":
        self._stack.enter_context(_STARTING)
        self._stack.enter_context(_undisturbed(self._variables))
        self._before = set(multiprocessing.active_children())
        self._is_open = True
        return self

    def end(self) -> None:
        """Notes the processes, and lets others start."""
        if self._is_open:
            self._is_open = False
            self.processes = [each for each in multiprocessing.active_children() if each not in self._before]
            self.metrics_folder = os.environ.get(_METRICS, "")
            self._stack.close()

    def __exit__(self, *_: object) -> None:
        self.end()


def _engine_class(package: SglangPackage, launch: _Launch) -> Any:
    """SGLang's Engine with processes of ours. The tokenizer manager is the last that it starts before it waits."""
    original = package.engine.init_tokenizer_manager_func

    def init_tokenizer_manager(*arguments: Any, **named: Any) -> Any:
        try:
            return original(*arguments, **named)
        finally:
            launch.end()

    own = {
        "run_scheduler_process_func": run_scheduler,
        "run_detokenizer_process_func": run_detokenizer,
        "init_tokenizer_manager_func": init_tokenizer_manager,
    }
    return type("BatonEngine", (package.engine,), {name: staticmethod(each) for name, each in own.items()})


async def end(started: StartedSglang) -> None:
    """Ends SGLang's processes, and closes what is left of it in this one: sockets, and the bootstrap server."""
    await asyncio.to_thread(_end, started)


def _end(started: StartedSglang) -> None:
    _kill(started.processes)
    manager = started.llm.tokenizer_manager
    for socket in (manager.recv_from_detokenizer, manager.send_to_scheduler, started.llm.send_to_rpc):
        socket.close(linger=0)
    if manager.bootstrap_server is not None:
        manager.bootstrap_server.close()
    for address in vars(started.llm.port_args).values():
        if isinstance(address, str) and address.startswith("ipc://"):
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


def _kill(processes: Sequence[BaseProcess]) -> None:
    """Kills these processes and their children."""
    psutil = importlib.import_module("psutil")
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        process.kill()
    for process in processes:
        process.join(_END_SECONDS)


def _arguments(config: SglangConfig, effective: ResolvedSglang, starting: SglangStart) -> dict[str, Any]:
    arguments = effective.value.model_dump(mode="json", exclude_none=True)
    return arguments | {
        "model_path": str(config.model),
        "context_length": starting.context_tokens + _SPARE_TOKENS,
        "skip_tokenizer_init": True,
        "log_level": "error",
        "host": config.handoff.host,
        "nccl_port": free_ports("127.0.0.1", 1),
        "enable_metrics": config.metrics,
        "kv_events_config": _events_config(config, starting.events),
        "disaggregation_mode": side(config, starting.roles),
        "disaggregation_transfer_backend": "nixl",
        "disaggregation_bootstrap_port": config.handoff.port,
    }


def _events_config(config: SglangConfig, events: EventEndpoints | None) -> str | None:
    if events is None:
        return None
    endpoints = {"endpoint": events.events, "replay_endpoint": events.replay}
    return json.dumps({"publisher": "zmq", **endpoints, "buffer_steps": config.kv_event_steps})


def _variables(config: SglangConfig, args: SglangArguments) -> dict[str, str]:
    handoff = config.handoff
    variables = {
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
        "SGLANG_HOST_IP": handoff.host,
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(handoff.bootstrap_seconds),
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(handoff.seconds),
        CLOSING_SECONDS: str(handoff.closing_seconds),
        # With deterministic inference SGLang computes no less of a prompt at once, so with smaller steps a longer one
        # would wait for ever.
        "SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE": str(min(4096, args.chunked_prefill_size)),
    }
    return variables | ({"UCX_TLS": handoff.ucx_tls} if handoff.ucx_tls else {})


@contextmanager
def _undisturbed(variables: dict[str, str]) -> Iterator[None]:
    """Sets variables, and puts back what SGLang changes meanwhile: the environment, the root logger, and how
    multiprocessing starts processes.
    """
    before, root = dict(os.environ), logging.getLogger()
    handlers, level = list(root.handlers), root.level
    method = multiprocessing.get_start_method(allow_none=True)
    os.environ.pop(_METRICS, None)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
        root.handlers[:] = handlers
        root.setLevel(level)
        multiprocessing.set_start_method(method, force=True)
