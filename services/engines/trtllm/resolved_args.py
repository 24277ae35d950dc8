"""The arguments in effect, each with its source, and the checks that they must pass before the engine is loaded.

docs/tensorrt-llm.md has the reasons of the checks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from packaging.version import Version

from baton.errors import ConfigError
from services.engines.external.argument_places import MergedArguments, resolve
from services.engines.trtllm.config import (
    AUTODEPLOY_ONLY,
    AUTODEPLOY_UNKNOWN,
    ENCODER_KNOWN,
    EngineArguments,
    TransceiverArguments,
    TrtllmConfig,
)

ResolvedArgs = MergedArguments[EngineArguments]


_OVERLAP_ON_PREFILL = Version("1.3.0.dev0")


@dataclass(frozen=True, slots=True)
class Environment:
    """The roles an engine is started for, and the machine and version it runs on."""

    roles: Sequence[str]
    version: Version
    gpus: int
    lease_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CheckedArgs:
    """Arguments that passed the checks, and warnings for the operator."""

    effective: ResolvedArgs
    warnings: tuple[str, ...]


def check(config: TrtllmConfig, environment: Environment) -> CheckedArgs:
    """Resolves and checks the arguments. Raises ConfigError that lists every fault, in one line."""
    effective = resolve(config)
    faults = [*_of_engine(effective.value, environment)]
    if config.backend == "autodeploy":
        faults += _of_autodeploy(effective.value, environment)
    else:
        faults += _of_autodeploy_only(effective, environment)
        if _must_hand_over(config, effective.value, environment):
            faults += _of_handoffs(config, effective.value, environment)
    if _must_not_overlap(environment):
        faults += _of_overlap(effective)
        effective = effective.forced("disable_overlap_scheduler", True)
    if effective.value.kv_connector_config is not None:
        faults += _of_connector(config, effective)
        effective = effective.forced("kv_cache_config.enable_partial_reuse", False)
    warnings = [*_warnings(config, effective, environment)]
    if config.backend == "autodeploy" and effective.value.kv_cache_config.event_buffer_max_size:
        warnings.append("kv_cache_config.event_buffer_max_size: set to 0, because AutoDeploy reports no KV events")
        effective = effective.forced("kv_cache_config.event_buffer_max_size", 0)
    if faults:
        raise ConfigError(f"trtllm {environment.version}: {'; '.join(faults)}")
    return CheckedArgs(effective, tuple(warnings))


def _of_engine(args: EngineArguments, environment: Environment) -> Iterator[str]:
    if args.gpus > environment.gpus:
        yield f"tensor x pipeline x context parallel size is {args.gpus}, and {environment.gpus} GPUs are visible"
    if args.max_seq_len is None and set(environment.roles) != {"encode"}:
        yield "max_seq_len: is unset; routers need to know how long a context may be"
    if args.max_beam_width != 1:
        yield f"max_beam_width: is {args.max_beam_width}; only 1 can be served"
    if args.kv_cache_config.event_buffer_max_size and not args.kv_cache_config.enable_block_reuse:
        yield "kv_cache_config.event_buffer_max_size: KV events need enable_block_reuse"


def _of_connector(config: TrtllmConfig, effective: ResolvedArgs) -> Iterator[str]:
    cache = effective.value.kv_cache_config
    if config.backend == "autodeploy":
        yield "kv_connector_config: only with backend: pytorch"
    if not cache.enable_block_reuse:
        yield "kv_connector_config: needs kv_cache_config.enable_block_reuse"
    if cache.enable_partial_reuse and _is_given(effective, "kv_cache_config.enable_partial_reuse"):
        yield "kv_cache_config.enable_partial_reuse: must be false with kv_connector_config"


def _of_autodeploy(args: EngineArguments, environment: Environment) -> Iterator[str]:
    for role in ("prefill", "encode"):
        if role in environment.roles:
            yield f"AutoDeploy cannot {role} for others: use backend: pytorch, or roles: [decode]"
    if args.can_hand_over:
        yield "cache_transceiver_config: AutoDeploy runs whole requests only, and cannot take KV over"


def _of_autodeploy_only(effective: ResolvedArgs, environment: Environment) -> Iterator[str]:
    if set(environment.roles) != {"encode"}:  # which leaves out, with a warning, all that it does not take
        yield from (f"{key}: only with backend: autodeploy" for key in AUTODEPLOY_ONLY if _is_given(effective, key))


def _must_hand_over(config: TrtllmConfig, args: EngineArguments, environment: Environment) -> bool:
    if "prefill" in environment.roles:
        return True
    return "decode" in environment.roles and (args.can_hand_over or not config.whole_requests)


def _of_handoffs(config: TrtllmConfig, args: EngineArguments, environment: Environment) -> Iterator[str]:
    transceiver = args.cache_transceiver_config
    if transceiver is None:
        if "prefill" in environment.roles:
            yield "cache_transceiver_config: the role prefill needs it"
        else:
            yield (
                "cache_transceiver_config: is unset, and this decode worker could never take KV over; if it serves "
                "whole requests only, set engine.whole_requests: true"
            )
        return
    if transceiver.backend not in ("NIXL", "UCX"):
        named = transceiver.backend or "unset"
        yield f"cache_transceiver_config.backend: is {named}; must be NIXL or UCX, the same in all versions"
    yield from _of_timeouts(config, transceiver, environment)
    yield from _of_buffer(args, transceiver)


def _of_timeouts(config: TrtllmConfig, transceiver: TransceiverArguments, environment: Environment) -> Iterator[str]:
    key, timeout = "cache_transceiver_config.kv_transfer_timeout_ms", transceiver.kv_transfer_timeout_ms
    if timeout is None:
        yield f"{key}: is unset; KV that is never fetched would be held for ever"
        return
    deadline, lease = config.handoff_deadline_seconds, environment.lease_seconds
    if timeout <= deadline * 1000:
        yield f"{key}: {timeout} must be over engine.handoff_deadline_seconds, {deadline} s"
    if timeout <= lease * 1000:
        yield f"{key}: {timeout} must be over handoff.lease_seconds, {lease} s"
    if timeout >= config.stall_seconds * 1000:
        yield f"{key}: {timeout} must be under engine.stall_seconds, {config.stall_seconds} s"
    future = transceiver.kv_transfer_sender_future_timeout_ms
    if future is not None and future > timeout:
        yield f"cache_transceiver_config.kv_transfer_sender_future_timeout_ms: {future} is over {timeout}"


def _of_buffer(args: EngineArguments, transceiver: TransceiverArguments) -> Iterator[str]:
    key, size = "cache_transceiver_config.max_tokens_in_buffer", transceiver.max_tokens_in_buffer
    block = args.kv_cache_config.tokens_per_block
    if size is None:
        yield f"{key}: is unset; it must be max_seq_len at least"
    elif args.max_seq_len is not None and size < args.max_seq_len:
        yield f"{key}: {size} is under max_seq_len, {args.max_seq_len}; longer prompts would never arrive"
    elif size % block:
        yield f"{key}: {size} is not a multiple of kv_cache_config.tokens_per_block, {block}"


def _must_not_overlap(environment: Environment) -> bool:
    return "prefill" in environment.roles and environment.version < _OVERLAP_ON_PREFILL


def _of_overlap(effective: ResolvedArgs) -> Iterator[str]:
    key = "disable_overlap_scheduler"
    if not effective.value.disable_overlap_scheduler and effective.source(key) != "default":
        yield f"{key}: must be true for the role prefill before 1.3"


def _is_given(effective: ResolvedArgs, key: str) -> bool:
    return any(f"{source}.".startswith(f"{key}.") for source in effective.sources)


def _warnings(config: TrtllmConfig, effective: ResolvedArgs, environment: Environment) -> Iterator[str]:
    args = effective.value
    if config.backend == "autodeploy":
        for key in AUTODEPLOY_UNKNOWN:
            if _is_given(effective, key):
                yield f"AutoDeploy does not take {key}; it is left out"
    if set(environment.roles) == {"encode"}:
        given = {key.partition(".")[0] for key in effective.sources}
        for key in sorted(given - set(ENCODER_KNOWN)):
            yield f"MultimodalEncoder does not take {key}; it is left out"
    if "prefill" in environment.roles and _must_not_overlap(environment) and args.kv_cache_config.enable_block_reuse:
        yield "before 1.3 a block may be evicted while it is sent: consider kv_cache_config.enable_block_reuse: false"
    cache = args.kv_cache_config
    overlaps = "prefill" in environment.roles and not args.disable_overlap_scheduler
    if overlaps and cache.enable_block_reuse and not _must_not_overlap(environment):
        yield (
            "disable_overlap_scheduler is false: not every candidate of 1.3 computes prompts for others with overlap "
            "and kv_cache_config.enable_block_reuse; true is safe for the role prefill"
        )
    if config.backend == "pytorch" and args.scheduler_config.dynamic_batch_config is not None:
        yield "scheduler_config.dynamic_batch_config has no effect in the PyTorch backend"
    if cache.event_buffer_max_size and effective.source("kv_cache_config.enable_block_reuse") == "default":
        yield (
            "kv_cache_config.enable_block_reuse is unset: the model's own defaults may switch it off, "
            "and then there are no KV events"
        )
    if not config.abort:
        yield "engine.abort is off: requests that are cancelled run to their end inside the engine"
