"""Opens the engine: imports SGLang and checks the arguments before anything is loaded."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager

from baton.errors import ConfigError
from services.engines.base import Engine
from services.engines.context import EngineContext
from services.engines.external.argument_places import resolve
from services.engines.sglang.config import SglangArguments, SglangConfig
from services.engines.sglang.engine import SglangEngine
from services.engines.sglang.loading import ResolvedSglang, on_cpus
from services.engines.sglang.package import open_sglang_package


def open_sglang(config: SglangConfig, context: EngineContext) -> AbstractAsyncContextManager[Engine]:
    """Returns the engine for these roles; entering it loads it. Raises ConfigError without SGLang, or for a wrong
    setting.
    """
    effective = resolve(config)
    check(config, effective, context.roles, context.lease_seconds)
    package = open_sglang_package()
    return SglangEngine(config, effective, package, context.roles)


def check(config: SglangConfig, effective: ResolvedSglang, roles: Sequence[str], lease_seconds: float) -> None:
    """Raises ConfigError that lists every fault, in one line."""
    if faults := [*_faults(config, effective.value, roles, lease_seconds)]:
        raise ConfigError(f"sglang: {'; '.join(faults)}")


def _faults(config: SglangConfig, args: SglangArguments, roles: Sequence[str], lease_seconds: float) -> Iterator[str]:
    if "prefill" in roles and "decode" in roles:
        yield "roles: prefill and decode need an engine each: one of SGLang's has one side only"
    if "prefill" in roles and config.whole_requests:
        yield "engine.whole_requests: the role prefill hands KV over"
    if config.handoff.seconds <= lease_seconds:
        yield f"engine.handoff.seconds: {config.handoff.seconds} must be over handoff.lease_seconds, {lease_seconds}"
    if args.dtype == "float32" and not on_cpus(args):
        yield "args.dtype: SGLang's kernels for GPUs have no float32"
    if args.enable_deterministic_inference and on_cpus(args):
        yield "args.enable_deterministic_inference: SGLang draws by seeds on GPUs only; set it to false"
