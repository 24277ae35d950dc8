"""Blocks that are named when their names are read lead to the same decisions as blocks that are named at once."""

import random
from collections.abc import Sequence

import pytest
from support.clock import ManualClock

from baton.engine.v1 import prompt_pb2
from baton.inference.v1 import cluster_service_pb2, generate_pb2
from discovery.record import WorkerRecord
from engine_protocol.prefix_hash import block_hashes
from router.routing.policy import Candidates, KnownLoras, Placement, PromptBlocks, RoutingRequest
from router.routing.prefix.kv_index import block_keys
from router.routing.prefix.predicted import PredictedSeconds
from router.routing.prefix.prefix_caches import Cache
from router.routing.prefix.prompt_blocks import PromptHasher

SIZE = 4


class Idle:
    """A worker that reports nothing but its size."""

    problem = embedding_layout = encoder = ""
    requests = waiting_tokens = others_tokens = 0
    wake_seconds = 0.0
    token_seconds: float | None = None
    loras = KnownLoras()

    def __init__(self, name: str, role: str) -> None:
        self.record = WorkerRecord(name, 1, "x:1", (role,), "m", "e", "a" * 64, 10_000)
        self.load = cluster_service_pb2.WorkerLoad(blocks_total=400)


PREFILL = [Idle(f"prefill-{index}", "prefill") for index in range(3)]
DECODE = [Idle(f"decode-{index}", "decode") for index in range(3)]
CACHES = [Cache(worker.record.process) for worker in PREFILL + DECODE]


def ask(policy: PredictedSeconds, ids: Sequence[int], keys: Sequence[int]) -> Placement[Idle]:
    """A decision about a prompt whose blocks have these keys."""
    request = RoutingRequest(
        "m", prompt_pb2.Prompt(token_ids=ids), generate_pb2.RoutingOptions(), blocks=PromptBlocks(keys, SIZE, 4096)
    )
    return policy.choose(request, Candidates(DECODE, PREFILL))


def prompt(source: random.Random) -> list[int]:
    """One of many prompts that share beginnings of any length, some longer than what is named together."""
    parts = [source.randrange(2) for _ in range(source.randrange(1, 14))]
    ids = [part for part in parts for _ in range(3 * SIZE)]
    return ids[: len(ids) - source.randrange(2 * SIZE)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("reports", [True, False])
def test_the_decisions_and_their_reasons_are_the_same(seed: int, reports: bool) -> None:
    source, clock, hasher = random.Random(seed), ManualClock(), PromptHasher()
    as_needed, at_once = (PredictedSeconds(clock=clock, seed=1) for _ in range(2))
    running: list[tuple[Placement[Idle], Placement[Idle]]] = []
    sent: list[list[int]] = []
    for cache in CACHES if reports else ():
        for policy in (as_needed, at_once):
            policy.caches.replace(cache, ())
    for _ in range(120):
        ids = prompt(source)
        names = block_keys(block_hashes(ids, SIZE))
        both = ask(as_needed, ids, hasher.keys(ids, SIZE)), ask(at_once, ids, names)
        assert both[0].explain() == both[1].explain()
        running.append(both)
        sent.append(names)
        clock.advance(source.random())
        _continue(source, running)
        if reports:
            _report(source, sent, as_needed, at_once)


def _continue(source: random.Random, running: list[tuple[Placement[Idle], Placement[Idle]]]) -> None:
    """Some requests get their first tokens, with fewer cached ones than predicted, or end."""
    for both in source.sample(running, len(running) // 2):
        ends, takes, cached = source.random() < 0.5, source.random() < 0.5, source.randrange(60)
        for placement in both:
            placement.progress.first_token(cached)
            if takes:
                placement.progress.accepted(())
            if ends:
                placement.progress.close()
        if ends:
            running.remove(both)


def _report(source: random.Random, sent: list[list[int]], *policies: PredictedSeconds) -> None:
    """Workers report the beginnings of prompts, and that some blocks are gone."""
    for _ in range(3):
        cache, keys, gone = source.choice(CACHES), source.choice(sent), source.choice(sent)
        stored, first = keys[: source.randrange(len(keys) + 1)], source.randrange(len(gone) + 1)
        for policy in policies:
            policy.caches.store(cache, stored)
            policy.caches.remove(cache, gone[first:])


def test_what_no_cache_can_have_is_not_named() -> None:
    policy, hasher = PredictedSeconds(clock=ManualClock()), PromptHasher()
    for cache in CACHES:
        policy.caches.replace(cache, ())
    ids = list(range(100 * SIZE))
    start = block_keys(block_hashes(ids[: 20 * SIZE], SIZE))
    policy.caches.store(CACHES[0], start)
    keys = hasher.keys(ids, SIZE)
    placement = ask(policy, ids, keys)
    assert placement.prediction is not None
    assert placement.prediction.cached_tokens == 20 * SIZE
    assert 20 < keys.num_known < 40
    assert list(keys) == block_keys(block_hashes(ids, SIZE))
