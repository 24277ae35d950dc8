"""The processes of a fleet, configured as its plan says."""

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import baton_http2.client.connection
import baton_http2.receiver
import baton_http2.server.connection
import baton_http2.stream
import engine_protocol.multiplex.channel
import engine_protocol.multiplex.replies
from baton.errors import Unavailable
from router.config import ProbeConfig, RetryConfig, RouterConfig, RoutingConfig
from router.processes.siblings import STOP_SECONDS, StoppedRequests, stop_here
from router.server import host_router
from router.text.tokenizer import Tokenizer
from rpc.auth.caller import Caller
from services.config import EncodeConfig, HandoffConfig, KeepConfig, KeepMemoryConfig, WorkerConfig
from services.engines.simulated.config import SimulatedConfig
from services.engines.simulated.tokens import IMAGE, byte_vocabulary
from services.server import host_worker
from services.sleeping.config import SleepConfig
from simulation.facades import HTTP_PORT
from simulation.invariants.fleet import BURST_SECONDS
from simulation.loop import Node
from simulation.plan import HTTP_APIS, Fleet, Plan

_DRAIN_SECONDS = 2.0
_TURN_SECONDS, _WAKE_SECONDS = 0.3, 0.05  # of workers that share memory
_SLOW_READER_SECONDS = 15.0  # less than is waited in quiet: what a half-open connection of HTTP/1.1 leaves ends so


# Of all routers, and of all runs of this process, which are forks: a chat template takes as long to compile as ten
# requests.
tokenizer_of = lru_cache(Tokenizer)


def compile_templates() -> None:
    """Makes the tokenizers of the simulated engine, before a run is forked."""
    for has_images in (False, True):
        files = byte_vocabulary(images=has_images).files
        tokenizer_of(
            files.tokenizer_json, files.tokenizer_config_json, files.chat_template, IMAGE if has_images else ""
        )


class SimulatedSiblings:
    """The other processes of a router, in the place of the supervisor and its links to them."""

    def __init__(self, world: Any, names: Sequence[str]) -> None:
        self._world, self._names = world, names

    async def stop(self, request_id: str, caller: Caller | None) -> StoppedRequests:
        """Stops what a caller runs there under this id. Raises Unavailable if one of them stands still."""
        found = [await self._stop_at(name, request_id, caller) for name in self._names if self._world.is_up(name)]
        return StoppedRequests(sum(one.count for one in found), [each for one in found for each in one.receipts])

    async def _stop_at(self, name: str, request_id: str, caller: Caller | None) -> StoppedRequests:
        node, table = self._world.nodes[name], self._world.hosts[name].requests
        await asyncio.sleep(self._world.network.delay())
        stopping = node.spawn(stop_here(table, request_id, caller))
        done, _ = await asyncio.wait({stopping}, timeout=STOP_SECONDS)
        if node.dead:
            return StoppedRequests()
        if not done:
            raise Unavailable("the other processes of this router do not answer")
        return stopping.result()


def keepers_of(world: Any) -> Any:
    """The keepers of a world; None if its plan has none. They need PyTorch, whose import takes as long as a run."""
    if not world.plan.fleet.keeps:
        return None
    from simulation.kept.keepers import Keepers

    return Keepers(world)


def set_buffers(fleet: Fleet) -> None:
    """Gives streams and connections buffers that answers of some hundred tokens can fill."""
    ends = (baton_http2.server.connection, baton_http2.client.connection, baton_http2.receiver)
    baton_http2.stream._HIGH_WATER = fleet.unsent_bytes  # type: ignore[misc]
    for module in (baton_http2.stream, *ends):
        module.RECEIVE_WINDOW = fleet.window_bytes  # type: ignore[attr-defined]
    engine_protocol.multiplex.replies._PAUSE_AT = fleet.pause_tokens
    engine_protocol.multiplex.replies._RESUME_AT = fleet.pause_tokens // 3
    engine_protocol.multiplex.channel._LARGE_BYTES = fleet.large_bytes
    for module in ends:
        module.CONNECTION_WINDOW = 8 * fleet.window_bytes  # type: ignore[attr-defined]


def router_of(plan: Plan, node: Node, registry: Any, address: str, siblings: SimulatedSiblings | None) -> Any:
    """A router by the product's own assembly, to be entered; with siblings it is one process of several."""
    fleet = plan.fleet
    has_http = any(asked.api in HTTP_APIS for asked in plan.requests)
    quota = {
        "requests_per_second": fleet.requests_per_second,
        "burst_seconds": BURST_SECONDS,
        "concurrent": fleet.concurrent,
    }
    config = RouterConfig(
        router_id=node.name,
        listen=f"{address}:7070",
        drain_seconds=_DRAIN_SECONDS,
        limits={"max_waiting_tokens": fleet.waiting_tokens, "slow_reader_seconds": _SLOW_READER_SECONDS},
        embeddings={"max_bytes": fleet.embeddings_bytes},
        routing=RoutingConfig(early_handoff_tokens=fleet.early_tokens, policy=fleet.policy),
        probe=ProbeConfig(interval_seconds=0.5, timeout_seconds=0.5, hung_seconds=1.5),
        retry=RetryConfig(answer_seconds=fleet.answer_seconds),
        multiplex=fleet.multiplex,
        # The kernel may give one process what its clients meant for all.
        admission={"max_running_per_worker": fleet.max_running, "max_waiting": fleet.max_waiting * fleet.processes},
        quotas={"default": quota, "tenants": {"probe": {}}, "unreachable_seconds": 5.0} if fleet.has_quotas else {},
        peers={"listen": f"{node.ip}:7071"},
        openai={"listen": f"{address}:{HTTP_PORT}"} if has_http else {},
    )
    return host_router(config, registry, siblings=siblings, shares_port=siblings is not None)


def worker_of(config: WorkerConfig, registry: Any, keeper: Any = None) -> Any:
    """A worker by the product's own assembly, to be entered."""
    return host_worker(config, registry, keeper=keeper)


def worker_config(plan: Plan, node: Node, group: Path, kept_slots: int = 0, blocks: int = 0) -> WorkerConfig:
    """The configuration of a worker; its name says its roles. `group` is the folder of those that share memory; with
    `kept_slots` in its journal it has a keeper, and perhaps other `blocks` than the plan says.
    """
    fleet, role = plan.fleet, node.name.partition("-")[0]
    engine = SimulatedConfig(
        name="demo",
        num_blocks=blocks or fleet.blocks,
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
        wake_seconds=_WAKE_SECONDS,
        guided_decoding=any(asked.guided for asked in plan.requests),
    )
    shares = fleet.shares_memory and role == "mixed"
    return WorkerConfig(
        worker_id=node.name,
        roles=("prefill", "decode") if role == "mixed" else (role,),
        listen=f"{node.ip}:7070",
        engine=_kept_config(kept_slots, engine) if kept_slots else engine,
        keep_memory=_keep_memory(fleet) if kept_slots else KeepMemoryConfig(),
        transports=(fleet.transport,),
        handoff=HandoffConfig(lease_seconds=fleet.lease_seconds),
        drain_seconds=_DRAIN_SECONDS,
        encode=EncodeConfig(inline_bytes=fleet.inline_bytes),
        keep=KeepConfig(max_parked=fleet.keep_parked),
        sleep=SleepConfig(group=group, group_bytes=1, bytes=1, turn_seconds=_TURN_SECONDS) if shares else SleepConfig(),
    )


def _kept_config(slots: int, engine: SimulatedConfig) -> Any:
    from simulation.kept.engine import KeptConfig

    return KeptConfig(slots=slots, **dict(engine))


def _keep_memory(fleet: Fleet) -> KeepMemoryConfig:
    return KeepMemoryConfig(
        weights=True, kv=True, imports=False, standby=fleet.stands_by, hang_seconds=fleet.hang_seconds
    )
