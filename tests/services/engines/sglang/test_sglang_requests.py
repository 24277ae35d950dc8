"""Requests inside SGLang: aborted until they have ended, and what a prefill that was aborted answers."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.eventually import eventually

from baton.errors import EngineFailed, HandoffLost, Overloaded, Unavailable, Unsupported
from services.engines.external.requests import RequestLimits
from services.engines.prompt import Sampling
from services.engines.sglang.config import SglangArguments
from services.engines.sglang.package import SglangPackage
from services.engines.sglang.requests import SglangGeneration, SglangRequest, SglangRequests
from services.engines.sglang.rooms import SglangDestination, read_room
from services.engines.sglang.sampling import check_sampling, sampling_params, unsupported_options

PROMPT = (5, 6, 7)


@dataclass
class Manager:
    """SGLang's tokenizer manager: a request has what a test puts into its queue, and ends by the `deaf`-th abort."""

    deaf: int = 0
    aborts: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    outputs: "asyncio.Queue[dict[str, Any] | Exception]" = field(default_factory=asyncio.Queue)

    async def generate_request(self, asked: Any, request: None) -> AsyncGenerator[dict[str, Any], None]:
        self.names.append(asked.rid)
        while True:
            output = await self.outputs.get()
            if isinstance(output, Exception):
                raise output
            yield output
            if output["meta_info"].get("finish_reason"):
                return

    def abort_request(self, name: str) -> None:
        self.aborts.append(name)
        if len(self.aborts) > self.deaf:
            self.outputs.put_nowait(said((), "abort"))


def said(ids: tuple[int, ...], finish: str | None = None, **told: Any) -> dict[str, Any]:
    """An output of SGLang: all ids so far."""
    reason = finish and {"type": finish, "message": "why"}
    return {"output_ids": list(ids), "meta_info": {"finish_reason": reason, **told}}


def inside(manager: Manager, most: int = 4, abort_seconds: float = 5.0) -> SglangRequests:
    package = cast(SglangPackage, SimpleNamespace(generate_request=SimpleNamespace))
    limits = RequestLimits(most, 16, 30.0, abort_seconds)
    return SglangRequests(SimpleNamespace(tokenizer_manager=manager), package, limits)


def submitted(
    manager: Manager, requests: SglangRequests | None = None, logprobs: int | None = None
) -> SglangGeneration:
    found = inside(manager) if requests is None else requests
    return found.submit(SglangRequest(PROMPT, {}, logprobs))


async def _only(generation: SglangGeneration) -> None:
    await generation.ending()
    generation.only()


async def test_names_have_the_same_length_so_that_an_abort_ends_one_request() -> None:
    manager = Manager()
    requests = inside(manager, most=12)
    for _ in range(11):
        submitted(manager, requests)
    await eventually(lambda: len(manager.names) == 11)
    assert {len(name) for name in manager.names} == {len(manager.names[0])}
    await requests.close()


async def test_an_abort_is_repeated_until_the_request_has_ended() -> None:
    manager = Manager(deaf=2)
    requests = inside(manager)
    generation = submitted(manager, requests)
    await requests.drop(generation)
    assert manager.aborts == [generation.name] * 3
    assert generation.has_ended
    assert len(requests) == 0


async def test_an_abort_that_sglang_never_handles_ends_in_time() -> None:
    manager = Manager(deaf=1000)
    requests = inside(manager, abort_seconds=0.2)
    await requests.drop(submitted(manager, requests))
    assert len(requests) == 0


@pytest.mark.parametrize(
    "output", [said((), "abort"), said((9,), "abort"), said((), "length"), said((9, 8), "length")], ids=range(4)
)
async def test_a_prefill_is_one_token_with_another_end_than_an_abort(output: dict[str, Any]) -> None:
    manager = Manager()
    generation = submitted(manager)
    manager.outputs.put_nowait(output)
    with pytest.raises(EngineFailed):
        await _only(generation)


async def test_the_first_token_of_a_prefill_has_its_report() -> None:
    manager = Manager()
    generation = submitted(manager, logprobs=2)
    reports = {"output_token_logprobs": [(-0.5, 9, None)], "output_top_logprobs": [[(-0.5, 9, None), (-1.0, 3, None)]]}
    manager.outputs.put_nowait(said((9,), "length", **reports))
    await generation.ending()
    token, report = generation.only()
    assert token == 9
    assert report is not None
    assert (report.logprob, report.top) == (-0.5, ((9, -0.5), (3, -1.0)))


async def test_ids_that_the_client_has_are_not_yielded_again() -> None:
    manager = Manager()
    generation = submitted(manager)
    manager.outputs.put_nowait(said((9, 8)))
    manager.outputs.put_nowait(said((9, 8, 7), "stop"))
    await generation.first_ids((9,))
    await generation.ending()
    tokens = generation.pull()
    assert tokens is not None
    assert tokens.ids == (8, 7)


async def test_another_first_id_than_the_clients_is_a_lost_handoff() -> None:
    manager = Manager()
    generation = submitted(manager)
    manager.outputs.put_nowait(said((9, 8)))
    with pytest.raises(HandoffLost):
        await generation.first_ids((4,))


async def test_a_failure_ends_every_request_and_refuses_later_ones() -> None:
    manager = Manager()
    requests = inside(manager)
    generation = submitted(manager, requests)
    requests.fail(EngineFailed("a process has ended"))
    with pytest.raises(EngineFailed, match="a process has ended"):
        await generation.ending()
    await eventually(lambda: len(requests) == 0)
    with pytest.raises(Unavailable):
        submitted(manager, requests)


async def test_one_request_too_many_is_refused() -> None:
    manager = Manager()
    requests = inside(manager, most=1)
    submitted(manager, requests)
    with pytest.raises(Overloaded):
        submitted(manager, requests)
    await requests.close()


async def test_a_room_is_released_once_and_its_blocks_are_counted_until_then() -> None:
    manager = Manager()
    requests = inside(manager)
    room = SglangDestination(12, submitted(manager, requests), requests.drop, blocks=3)
    assert (room.blocks, read_room(room.engine_state, "state")) == (3, 12)
    assert (await room.release(), await room.release(), room.blocks) == (3, 0, 0)
    assert len(requests) == 0


def test_ends_of_sequence_are_stop_tokens_unless_they_are_ignored() -> None:
    sampling = Sampling(max_tokens=5, temperature=0.5, seed=2**63 + 4, stop_token_ids=frozenset({9}))
    params = sampling_params(sampling, 5, (2,))
    assert (params["stop_token_ids"], params["ignore_eos"], params["sampling_seed"]) == ([2, 9], False, 4)
    ignoring = Sampling(max_tokens=5, temperature=0.0, ignore_eos=True, stop_token_ids=frozenset({9}))
    assert sampling_params(ignoring, 5, (2,))["stop_token_ids"] == [9]


def test_seeds_are_refused_without_deterministic_inference() -> None:
    seeded = Sampling(max_tokens=5, temperature=0.5, seed=4)
    check_sampling(seeded, unsupported_options(SglangArguments()))
    with pytest.raises(Unsupported, match="seed"):
        check_sampling(seeded, unsupported_options(SglangArguments(enable_deterministic_inference=False)))
