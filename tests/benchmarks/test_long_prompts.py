"""The benchmark of long prompts: what it sends, and what it holds the router to."""

import argparse
import os
import random
from pathlib import Path

import pytest

from benchmarks.peers.clients.long_prompts import HttpSender, Sender
from benchmarks.peers.cores import Cores
from benchmarks.peers.long_prompts import Load, Server, page, servers

CORES = Cores(*[frozenset(os.sched_getaffinity(0))] * 2)


@pytest.mark.parametrize("is_text", [True, False], ids=["text", "ids"])
def test_prompts_share_as_much_as_is_said_and_have_the_length(is_text: bool) -> None:
    first, *rest = Load(1000, is_text, 0.95).prompts(3, random.Random(1))
    assert len(first) == 1000
    for prompt in rest:
        assert len(prompt) == 1000
        assert prompt[:950] == first[:950]
        assert prompt[950:960] != first[950:960]
    new, other = Load(1000, is_text, 0.0).prompts(1, random.Random(1))
    assert new[:20] != other[:20]


def test_the_page_holds_baton_to_its_bar_and_says_what_the_router_adds() -> None:
    sender: Sender = HttpSender(1)
    seen, new = Load(100_000, True, 0.95), Load(100_000, True, 0.0)
    engine = Server("worker", 0, sender, first_token={seen: [5.0, 7.0, 6.0]})
    own = Server("Baton", 1, sender, "worker", {seen: [60.0, 40.0, 41.0], new: [90.0]}, {seen: [9.0, 8.0, 8.5]})
    options = argparse.Namespace(rounds=3, requests=2)
    printed = page([engine, own], [seen, new], CORES, options)
    assert "| 100,000 tokens, text, 95% seen | Baton | 41.00 | 40.00 - 60.00 | 8.50 | 2.50 |" in printed
    assert printed.endswith("text, 95% seen: 0.0410 core for each request a second, at most 0.05: reached.\n")
    own.cpu[seen] = [60.0]
    assert printed.replace("0.0410", "x") != page([engine, own], [seen, new], CORES, options)
    assert "0.0600 core for each request a second, at most 0.05: **not reached**" in page(
        [engine, own], [seen, new], CORES, options
    )


async def test_each_server_gets_prompts_of_both_kinds(tmp_path: Path) -> None:
    options = argparse.Namespace(folder=tmp_path, peers=[])
    async with servers(options, CORES) as found:
        assert [each.name for each in found] == ["worker", "HTTP engine", "Baton"]
        for server in found:
            for is_text in (True, False):
                await server.measure(load := Load(70_000, is_text, 0.95), 1, "seed")
                assert server.first_token[load][0] > 0
                assert bool(server.pid) == (load in server.cpu)
