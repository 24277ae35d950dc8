"""What a TensorRT-LLM configuration must fulfil before the engine is started; docs/tensorrt-llm.md says why."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from packaging.version import Version

from rpc.errors import ConfigError
from services.engines.trtllm.arguments import (
    AUTODEPLOY_UNKNOWN,
    ENCODER_KNOWN,
    EngineArguments,
    TransceiverArguments,
)
from services.engines.trtllm.config import TrtllmConfig
from services.engines.trtllm.effective import Effective, resolve

_OVERLAP_ON_PREFILL = Version("1.3.0.dev0")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an engine is started for, and where."""

    roles: Sequence[str]
    version: Version
    gpus: int
    lease_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Checked:
    """Arguments that may be started with, and what the operator should know of them."""

    effective: Effective
    warnings: tuple[str, ...]


def check(config: TrtllmConfig, surroundings: Surroundings) -> Checked:
    """The effective arguments. Raises ConfigError that names everything that must be mended, in one line."""
    effective = resolve(config)
    faults = [*_of_engine(effective.value, surroundings)]
    if config.backend == "autodeploy":
        faults += _of_autodeploy(effective.value, surroundings)
    elif "prefill" in surroundings.roles or ("decode" in surroundings.roles and effective.value.can_hand_over):
        faults += _of_handoffs(config, effective.value, surroundings)
    if _must_not_overlap(surroundings):
        faults += _of_overlap(effective)
        effective = effective.guarded("disable_overlap_scheduler", True)
    warnings = [*_warnings(config, effective, surroundings)]
    if config.backend == "autodeploy" and effective.value.kv_cache_config.event_buffer_max_size:
        warnings.append("AutoDeploy tells no KV events; kv_cache_config.event_buffer_max_size is 0")
        effective = effective.guarded("kv_cache_config.event_buffer_max_size", 0)
    if faults:
        raise ConfigError(f"trtllm {surroundings.version}: {'; '.join(faults)}")
    return Checked(effective, tuple(warnings))


def _of_engine(args: EngineArguments, surroundings: Surroundings) -> Iterator[str]:
    if args.gpus > surroundings.gpus:
        yield f"tensor x pipeline x context parallel size is {args.gpus}, and {surroundings.gpus} GPUs are visible"
    if args.max_seq_len is None and set(surroundings.roles) != {"encode"}:
        yield "max_seq_len: is unset; routers need to know how long a context may be"
    if args.max_beam_width != 1:
        yield f"max_beam_width: is {args.max_beam_width}; only 1 can be served"
    if args.kv_cache_config.event_buffer_max_size and not args.kv_cache_config.enable_block_reuse:
        yield "kv_cache_config.event_buffer_max_size: there are no events without enable_block_reuse"


def _of_autodeploy(args: EngineArguments, surroundings: Surroundings) -> Iterator[str]:
    for role in ("prefill", "encode"):
        if role in surroundings.roles:
            yield f"AutoDeploy cannot {role} for others: use backend: pytorch, or roles: [decode]"
    if args.can_hand_over:
        yield "cache_transceiver_config: AutoDeploy runs whole requests only, and cannot take KV over"


def _of_handoffs(config: TrtllmConfig, args: EngineArguments, surroundings: Surroundings) -> Iterator[str]:
    transceiver = args.cache_transceiver_config
    if transceiver is None:
        yield "cache_transceiver_config: the role prefill needs it"
        return
    if transceiver.backend not in ("NIXL", "UCX"):
        named = transceiver.backend or "unset"
        yield f"cache_transceiver_config.backend: is {named}; must be NIXL or UCX, as versions differ in what others do"
    yield from _of_timeouts(config, transceiver, surroundings)
    yield from _of_buffer(args, transceiver)


def _of_timeouts(config: TrtllmConfig, transceiver: TransceiverArguments, surroundings: Surroundings) -> Iterator[str]:
    key, timeout = "cache_transceiver_config.kv_transfer_timeout_ms", transceiver.kv_transfer_timeout_ms
    if timeout is None:
        yield f"{key}: is unset; KV that nobody fetches would be held for ever"
        return
    deadline, lease = config.handoff_deadline_seconds, surroundings.lease_seconds
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
        yield f"{key}: {size} is no multiple of kv_cache_config.tokens_per_block, {block}"


def _must_not_overlap(surroundings: Surroundings) -> bool:
    return "prefill" in surroundings.roles and surroundings.version < _OVERLAP_ON_PREFILL


def _of_overlap(effective: Effective) -> Iterator[str]:
    key = "disable_overlap_scheduler"
    if not effective.value.disable_overlap_scheduler and effective.source(key) != "default":
        yield f"{key}: must be true for the role prefill before 1.3"


def _warnings(config: TrtllmConfig, effective: Effective, surroundings: Surroundings) -> Iterator[str]:
    args = effective.value
    if config.backend == "autodeploy":
        for key in AUTODEPLOY_UNKNOWN:
            if any(f"{source}.".startswith(f"{key}.") for source in effective.sources):
                yield f"AutoDeploy does not take {key}; it is left out"
    if set(surroundings.roles) == {"encode"}:
        given = {key.partition(".")[0] for key in effective.sources}
        for key in sorted(given - set(ENCODER_KNOWN)):
            yield f"MultimodalEncoder does not take {key}; it is left out"
    if "prefill" in surroundings.roles and _must_not_overlap(surroundings) and args.kv_cache_config.enable_block_reuse:
        yield "before 1.3 a block may be evicted while it is sent: consider kv_cache_config.enable_block_reuse: false"
    if not config.abort:
        yield "engine.abort is off: requests that are cancelled run to their end inside the engine"
