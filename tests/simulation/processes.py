"""The processes of a fleet, configured as its plan says."""

from typing import Any

from router.config import ProbeConfig, RetryConfig, RouterConfig, RoutingConfig
from router.server import host_router
from services.config import EncodeConfig, HandoffConfig, KeepConfig, WorkerConfig
from services.engines.simulated.config import SimulatedConfig
from services.server import host_worker
from simulation.facades import HTTP_PORT
from simulation.invariants.fleet import BURST_SECONDS
from simulation.loop import Node
from simulation.plan import HTTP_APIS, Plan

_DRAIN_SECONDS = 2.0
_SLOW_READER_SECONDS = 15.0  # less than is waited in quiet: what a half-open connection of HTTP/1.1 leaves ends so


def router_of(plan: Plan, node: Node, registry: Any) -> Any:
    """A router by the product's own assembly, to be entered."""
    fleet = plan.fleet
    has_http = any(asked.api in HTTP_APIS for asked in plan.requests)
    quota = {
        "requests_per_second": fleet.requests_per_second,
        "burst_seconds": BURST_SECONDS,
        "concurrent": fleet.concurrent,
    }
    config = RouterConfig(
        router_id=node.name,
        listen=f"{node.ip}:7070",
        drain_seconds=_DRAIN_SECONDS,
        limits={"max_waiting_tokens": fleet.waiting_tokens, "slow_reader_seconds": _SLOW_READER_SECONDS},
        embeddings={"max_bytes": fleet.embeddings_bytes},
        routing=RoutingConfig(early_handoff_tokens=fleet.early_tokens, policy=fleet.policy),
        probe=ProbeConfig(interval_seconds=0.5, timeout_seconds=0.5, hung_seconds=1.5),
        retry=RetryConfig(answer_seconds=fleet.answer_seconds),
        multiplex=fleet.multiplex,
        admission={"max_running_per_worker": fleet.max_running, "max_waiting": fleet.max_waiting},
        quotas={"default": quota, "tenants": {"probe": {}}, "unreachable_seconds": 5.0} if fleet.has_quotas else {},
        peers={"listen": f"{node.ip}:7071"},
        openai={"listen": f"{node.ip}:{HTTP_PORT}"} if has_http else {},
    )
    return host_router(config, registry)


def worker_of(plan: Plan, node: Node, registry: Any) -> Any:
    """A worker by the product's own assembly, to be entered; its name says its roles."""
    fleet, role = plan.fleet, node.name.partition("-")[0]
    engine = SimulatedConfig(
        name="demo",
        num_blocks=fleet.blocks,
        block_tokens=16,
        block_bytes=64,
        data_parallel_ranks=fleet.ranks if role == "decode" else 1,
        decode_step_seconds=fleet.step_seconds,
        prefill_base_seconds=0.002,
        prefill_chunk_tokens=48,
        max_batch=fleet.max_batch,
        prefill_tokens_per_second=fleet.prefill_rate,
        encode_seconds=fleet.encode_seconds,
        image_tokens=4,
        image_hidden_size=fleet.image_hidden_size,
    )
    config = WorkerConfig(
        worker_id=node.name,
        roles=("prefill", "decode") if role == "mixed" else (role,),
        listen=f"{node.ip}:7070",
        engine=engine,
        transports=(fleet.transport,),
        handoff=HandoffConfig(lease_seconds=fleet.lease_seconds),
        drain_seconds=_DRAIN_SECONDS,
        encode=EncodeConfig(inline_bytes=fleet.inline_bytes),
        keep=KeepConfig(max_parked=fleet.keep_parked),
    )
    return host_worker(config, registry)
