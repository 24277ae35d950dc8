"""Tiers in simulated time: the pool, the directory, the rates and the router's policy are real."""

import json
from functools import cache
from pathlib import Path

import pytest

from benchmarks.routing.simulated.clock import Time
from benchmarks.tiers.__main__ import main
from benchmarks.tiers.cluster import INFINITE, Cluster, Policy
from benchmarks.tiers.traffic import Agents, Replay
from benchmarks.tiers.worker import Hardware, Job, Sizes, Worker, hash_of
from devtools.bench.traces import BLOCK_TOKENS, TracedRequest
from router.routing.prefix.prefix_caches import PrefixCaches

SECONDS, WARM_SECONDS, SESSIONS, CHATS = 400.0, 150.0, 40, 20


@cache
def run(policy: Policy, share: float = 1.0) -> Cluster:
    """Agents and chats, with pools of this share of what is live."""
    time = Time()
    traffic = Agents(time, 3, SESSIONS, CHATS, SECONDS)
    live = sorted(run(INFINITE).live_blocks) if policy is not INFINITE else [0]
    pool = 10**6 if policy is INFINITE else int(live[len(live) // 2] * share / 4)
    cluster = Cluster(time, policy, Hardware(), pool, WARM_SECONDS)
    traffic.cluster = cluster
    time.run()
    cluster.live_blocks = traffic.live_blocks
    return cluster


HOST, ENDS = Policy("host", host=2), Policy("host and end", host=2, ends=True)


@pytest.mark.parametrize("policy", [HOST, ENDS])
def test_host_memory_saves_most_of_what_the_pool_alone_computes_again(policy: Policy) -> None:
    alone, kept, infinite = run(Policy("pool alone"), 0.25), run(policy, 0.25), run(INFINITE)
    assert kept.measured.hit > alone.measured.hit + 0.1
    assert kept.measured.hit > infinite.measured.hit - 0.1
    assert kept.measured.quantile(0.9) < 0.7 * alone.measured.quantile(0.9)


def test_fewer_blocks_go_down_in_vain_if_sessions_say_that_they_end() -> None:
    assert run(ENDS, 0.25).unread < run(HOST, 0.25).unread


def replayed(policy: Policy, pool_blocks: int, *trace: TracedRequest) -> Cluster:
    time = Time()
    traffic = Replay(time, trace, speedup=1.0)
    traffic.cluster = Cluster(time, policy, Hardware(), pool_blocks, warm_seconds=0.0)
    time.run()
    return traffic.cluster


def request(at: float, blocks: range, **options: object) -> TracedRequest:
    return TracedRequest(at, tuple(blocks), len(blocks) * BLOCK_TOKENS, 1000, **options)  # type: ignore[arg-type]


def test_a_turn_with_a_delay_is_sent_so_long_after_the_answer_before() -> None:
    first = request(0.0, range(100), session_id="a")
    cluster = replayed(ENDS, 1000, first, request(22.0, range(120), session_id="a", delay_seconds=2.0))
    # 100 blocks are computed in 1.28 s and answered in 7: not in the 20 that the trace assumes.
    assert cluster._last_sent == pytest.approx(100 * BLOCK_TOKENS / 40_000 + 1000 * 0.007 + 2.0)
    assert (len(cluster.measured.first_tokens), cluster.measured.found["device"]) == (1, 100)


@pytest.mark.parametrize("ends", [True, False])
def test_a_session_of_a_trace_ends_with_the_line_that_says_so(ends: bool) -> None:
    cluster = replayed(ENDS, 1000, request(0.0, range(100), session_id="a", ends_session=ends))
    assert any(worker.pool._idle.has_dead for worker in cluster.workers) == ends


def test_a_prompt_that_waits_for_memory_runs_once_another_one_is_handed_over() -> None:
    time, ended = Time(), dict[str, float]()
    worker = Worker("p", time, Hardware(), Sizes(pool=100), PrefixCaches(time))
    for name, first, blocks in (("runs", 0, 60), ("waits", 1000, 60), ("passes it", 2000, 2)):
        hashes = [hash_of(first + number) for number in range(blocks)]
        worker.run(Job("", hashes, lambda _, name=name: ended.setdefault(name, time.now)))  # type: ignore[misc]
    time.run()
    seconds = BLOCK_TOKENS / 40_000
    handed_over = pytest.approx(60 * seconds + 0.05 + 60 * seconds)
    assert ended == {"runs": 60 * seconds, "passes it": pytest.approx(62 * seconds), "waits": handed_over}


def test_prompts_that_wait_find_what_those_before_them_have_computed() -> None:
    time, found = Time(), list[int]()
    worker = Worker("p", time, Hardware(), Sizes(pool=200), PrefixCaches(time))
    for number in range(3):
        hashes = [hash_of(block) for block in (*range(50), 1000 + number)]
        worker.run(Job("", hashes, lambda job: found.append(job.found["device"])))
    time.run()
    assert found == [0, 50, 50]


@pytest.mark.parametrize(("patience_seconds", "from_peer"), [(10.0, 50), (0.1, 0)])
def test_a_loan_waits_for_memory_as_long_as_computing_would_take(patience_seconds: float, from_peer: int) -> None:
    time, found = Time(), list[int]()
    caches = PrefixCaches(time)
    lender, worker = (Worker(name, time, Hardware(), Sizes(pool=100), caches) for name in ("lender", "p"))
    hashes = [hash_of(number) for number in range(51)]
    lender.run(Job("", hashes, lambda _: None))
    time.run()
    worker.run(Job("", [hash_of(1000 + number) for number in range(60)], lambda _: None))
    job = Job("", hashes, lambda job: found.append(job.found["peer"]))
    job.lender, job.lent_blocks, job.patience_seconds = lender, 50, patience_seconds
    worker.run(job)
    time.run()
    assert found == [from_peer]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['{"timestamp": 0}'], "trace.jsonl:1: is not a request in Mooncake's format"),
        ([json.dumps({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]})], "nothing to cache"),
    ],
)
def test_a_trace_that_cannot_be_run_is_refused(
    tmp_path: Path, lines: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr("sys.argv", ["tiers", "trace", "--trace", str(tmp_path / "trace.jsonl")])
    with pytest.raises(SystemExit):
        main()
    assert said in capsys.readouterr().err
