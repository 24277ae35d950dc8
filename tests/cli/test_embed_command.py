"""`baton embed`, and both clients' `embed`: the vectors that Embed answers."""

import asyncio
import json

from support.clients.baton_command import Baton
from support.cluster.in_process import bench, simulated

from baton import AsyncClient, Client


async def test_each_text_is_a_line_of_json_as_the_clients_return_it(baton: Baton) -> None:
    async with bench(simulated("e1", "embed")) as running:
        words = ("embed", "one", "another", "--dimensions", "5", "--address", running.address)
        outcome = await baton(*words)
        read = await baton("embed", "-", "--dimensions", "5", "--address", running.address, stdin=b"one\nanother\n")
        async with AsyncClient(running.address) as client:
            response = await client.embed(["one", list(b"another")], dimensions=5)
        with Client(running.address) as blocking:
            again = await asyncio.to_thread(blocking.embed, ["one", "another"], dimensions=5, model="demo")
    assert [json.loads(line) for line in outcome.lines] == [
        [float(f"{value:.8g}") for value in each.values] for each in response.embeddings
    ]
    assert (outcome.code, read.out) == (0, outcome.out)
    assert [len(each.values) for each in again.embeddings] == [5, 5]
    assert list(again.embeddings) == list(response.embeddings)


async def test_a_text_that_is_too_long_is_named(baton: Baton) -> None:
    async with bench(simulated("e1", "embed", max_context_tokens=8)) as running:
        outcome = await baton("embed", "short", "much longer than that", "--address", running.address)
    assert outcome.code == 2
    assert "inputs[1]" in outcome.err
