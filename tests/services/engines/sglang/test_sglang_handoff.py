"""Handoffs between two engines of SGLang: the decode side allocates a room, and the prefill side sends into it."""

import asyncio
from dataclasses import replace

import pytest
from support.engines import sglang
from support.engines.engine_calls import collect, greedy
from support.eventually import eventually

from baton.errors import HandoffLost, InvalidRequest, Overloaded, Unsupported
from services.engines.kv_transfer import AllocatesFirst, RemoteKv
from services.engines.prompt import Prompt, Sampling
from services.engines.sglang.engine import SglangEngine
from services.engines.sglang.rooms import SglangDestination

pytestmark = [pytest.mark.requires_sglang, pytest.mark.usefixtures("end_of_sglang"), pytest.mark.timeout(600)]

ADDRESS = "127.0.0.1:1"
SAMPLED = Sampling(max_tokens=12, temperature=0.9, seed=5, ignore_eos=True)
WAYS = {"greedy": greedy(12), **({"seeded": SAMPLED} if sglang.ON_GPU else {})}


def _prompt(length: int) -> Prompt:
    return Prompt(tuple((index * index + 13 * length) % 300 + 10 for index in range(length)))


async def _handed_over(
    prefill: SglangEngine, decode: SglangEngine, prompt: Prompt, sampling: Sampling
) -> tuple[int, ...]:
    """Returns all ids of an answer over both."""
    room = await decode.allocate(prompt, sampling, ADDRESS)
    try:
        held = await prefill.prefill_into(prompt, sampling, room.engine_state)
    except BaseException:
        await room.release()
        raise
    return (held.first_token, *await _rest(decode, room, prompt, held.first_token, sampling))


async def _rest(
    decode: SglangEngine, room: SglangDestination, prompt: Prompt, first: int, sampling: Sampling
) -> tuple[int, ...]:
    following = replace(prompt, emitted=(*prompt.emitted, first))
    source = RemoteKv(following, prompt.num_tokens, room.engine_state, room)
    return (await collect(await decode.decode_remote(source, sampling))).ids


async def test_its_engines_allocate_first_and_refuse_the_other_side(
    prefill: SglangEngine, decode: SglangEngine
) -> None:
    assert isinstance(prefill.kv_transfer, AllocatesFirst)
    with pytest.raises(Unsupported):
        await prefill.allocate(_prompt(5), greedy(3), ADDRESS)
    with pytest.raises(Unsupported):
        await decode.prefill_into(_prompt(5), greedy(3), b'{"room": 1}')
    with pytest.raises(Unsupported):
        await collect(prefill.decode(_prompt(5), greedy(3)))


@pytest.mark.parametrize("way", WAYS)
async def test_answers_over_two_engines_are_those_of_one(prefill: SglangEngine, decode: SglangEngine, way: str) -> None:
    prompts = [_prompt(length) for length in (1, 5, 15, 16, 17, 63, 64, 65, 130, 200)]
    async with sglang.SHARED.lend("whole") as one:
        whole = [(await collect(one.decode(prompt, WAYS[way]))).ids for prompt in prompts]
    assert [await _handed_over(prefill, decode, prompt, WAYS[way]) for prompt in prompts] == whole


@pytest.mark.parametrize("way", WAYS)
async def test_prompts_computed_here_and_elsewhere_share_a_batch(
    prefill: SglangEngine, decode: SglangEngine, way: str
) -> None:
    prompts = [_prompt(length) for length in (20, 40, 70, 33)]
    whole = [(await collect(decode.decode(prompt, WAYS[way]))).ids for prompt in prompts]
    here = [collect(decode.decode(prompt, WAYS[way])) for prompt in prompts[:2]]
    there = [_handed_over(prefill, decode, prompt, WAYS[way]) for prompt in prompts[2:]]
    first, second, *others = await asyncio.gather(*here, *there)
    assert [first.ids, second.ids, *others] == whole


async def test_an_answer_is_handed_over_behind_emitted_tokens(prefill: SglangEngine, decode: SglangEngine) -> None:
    whole = (await collect(decode.decode(_prompt(50), greedy(12)))).ids
    continued = replace(_prompt(50), emitted=whole[:4])
    assert await _handed_over(prefill, decode, continued, greedy(12)) == whole[4:]


async def test_a_room_that_no_prefill_comes_for_is_closed_by_its_release(decode: SglangEngine) -> None:
    for pause in (0.0, 0.3):
        room = await decode.allocate(_prompt(50), greedy(12), ADDRESS)
        await asyncio.sleep(pause)
        blocks = -(-50 // sglang.BLOCK_TOKENS)
        assert decode.load().blocks_held == blocks
        assert await room.release() == blocks
        assert decode.load().blocks_used == decode.load().running == 0
        assert await room.release() == 0


async def test_a_prefill_for_a_closed_room_sends_nothing(prefill: SglangEngine, decode: SglangEngine) -> None:
    for pause in (0.0, 0.3):
        room = await decode.allocate(_prompt(50), greedy(12), ADDRESS)
        await asyncio.sleep(pause)
        await room.release()
        with pytest.raises(HandoffLost):
            await prefill.prefill_into(_prompt(50), greedy(12), room.engine_state)
    # Its blocks, which are given out again after a while, have what is computed into them.
    whole = (await collect(decode.decode(_prompt(60), greedy(12)))).ids
    assert await _handed_over(prefill, decode, _prompt(60), greedy(12)) == whole


async def test_a_cancelled_prefill_frees_both_sides(prefill: SglangEngine, decode: SglangEngine) -> None:
    for pause in (0.0, 0.01, 0.05):
        room = await decode.allocate(_prompt(200), greedy(12), ADDRESS)
        computing = asyncio.create_task(prefill.prefill_into(_prompt(200), greedy(12), room.engine_state))
        await asyncio.sleep(pause)
        computing.cancel()
        await asyncio.wait([computing])
        assert prefill.load().running == 0
        await room.release()
        assert decode.load().blocks_used == 0
    assert len(await _handed_over(prefill, decode, _prompt(200), greedy(5))) == 5


async def test_blocks_of_a_room_that_ended_early_are_kept_for_a_while(
    prefill: SglangEngine, decode: SglangEngine
) -> None:
    """A prompt that needs nearly the whole pool waits until they are free, and is right."""
    whole = (await collect(decode.decode(_prompt(240), greedy(5)))).ids
    rooms = [await decode.allocate(_prompt(120), greedy(5), ADDRESS) for _ in range(3)]
    await asyncio.sleep(0.5)
    for room in rooms:
        await room.release()
    assert await _handed_over(prefill, decode, _prompt(240), greedy(5)) == whole


async def test_a_prompt_that_the_pool_has_no_room_for_is_refused(decode: SglangEngine) -> None:
    rooms = [await decode.allocate(_prompt(200), greedy(5), ADDRESS) for _ in range(2)]
    with pytest.raises(Overloaded):
        await decode.allocate(_prompt(200), greedy(5), ADDRESS)
    for room in rooms:
        await room.release()


async def test_a_first_token_that_ends_the_answer_needs_no_decode(prefill: SglangEngine, decode: SglangEngine) -> None:
    room = await decode.allocate(_prompt(20), greedy(1), ADDRESS)
    held = await prefill.prefill_into(_prompt(20), greedy(1), room.engine_state)
    assert held.finish_reason is not None
    assert held.engine_state == b""
    await room.release()


async def test_a_state_of_another_room_is_refused(decode: SglangEngine, prefill: SglangEngine) -> None:
    with pytest.raises(InvalidRequest, match="destination_id"):
        await decode.decode_remote(RemoteKv(replace(_prompt(5), emitted=(7,)), 5, b'{"room": 5}'), greedy(5))
    room = await decode.allocate(_prompt(20), greedy(5), ADDRESS)
    with pytest.raises(InvalidRequest, match="another room"):
        await decode.decode_remote(RemoteKv(replace(_prompt(20), emitted=(7,)), 20, b'{"room": 5}', room), greedy(5))
    for state in (b"", b"\x00", b"{}", b'{"room": "1"}', b'{"room": -1}'):
        with pytest.raises(InvalidRequest):
            await prefill.prefill_into(_prompt(5), greedy(5), state)


async def test_another_first_token_than_the_prefills_is_found_out(prefill: SglangEngine, decode: SglangEngine) -> None:
    room = await decode.allocate(_prompt(20), greedy(5), ADDRESS)
    held = await prefill.prefill_into(_prompt(20), greedy(5), room.engine_state)
    with pytest.raises(HandoffLost, match="did not go on"):
        await _rest(decode, room, _prompt(20), (held.first_token + 1) % 300, greedy(5))


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {17: 100.0}},
        {"presence_penalty": 1.5, "frequency_penalty": 1.0},
        {"repetition_penalty": 1.7},
        {"top_k": 3},
    ],
    ids=lambda each: next(iter(each)),
)
async def test_options_count_on_both_sides(
    prefill: SglangEngine, decode: SglangEngine, options: dict[str, object]
) -> None:
    chosen = replace(greedy(12), **options)  # type: ignore[arg-type]
    whole = (await collect(decode.decode(_prompt(40), chosen))).ids
    assert await _handed_over(prefill, decode, _prompt(40), chosen) == whole


@pytest.mark.skipif(not sglang.ON_GPU, reason="BATON_TEST_DEVICE=cuda runs this test: on CPUs SGLang has no seeds")
@pytest.mark.parametrize(
    "beside", [greedy(60), replace(SAMPLED, max_tokens=60, top_k=7, top_p=0.9)], ids=["greedy", "top_k"]
)
async def test_a_drawn_answer_is_the_same_beside_others(decode: SglangEngine, beside: Sampling) -> None:
    drawn = replace(SAMPLED, max_tokens=40, temperature=1.0)
    alone = (await collect(decode.decode(_prompt(40), drawn))).ids
    other, answer = await asyncio.gather(
        collect(decode.decode(_prompt(50), beside)), collect(decode.decode(_prompt(40), drawn))
    )
    assert answer.ids == alone
    assert (await collect(decode.decode(_prompt(50), beside))).ids == other.ids


async def test_log_probabilities_come_from_both_sides(prefill: SglangEngine, decode: SglangEngine) -> None:
    asked = replace(greedy(6), logprobs=3)
    whole = await collect(decode.decode(_prompt(40), asked))
    assert [each.token_id for each in whole.logprobs] == list(whole.ids)
    room = await decode.allocate(_prompt(40), asked, ADDRESS)
    held = await prefill.prefill_into(_prompt(40), asked, room.engine_state)
    following = replace(_prompt(40), emitted=(held.first_token,))
    rest = await collect(await decode.decode_remote(RemoteKv(following, 40, room.engine_state, room), asked))
    told = [held.logprob, *rest.logprobs]
    near = 0.05 if sglang.ON_GPU else 0.001
    for one, other in zip(whole.logprobs, told, strict=True):
        assert other is not None
        assert other.logprob == pytest.approx(one.logprob, abs=near)
        assert len(other.top) == 3


async def test_seeds_and_what_it_lacks_are_refused_by_name(decode: SglangEngine) -> None:
    lacking = decode.facts.unsupported_sampling
    assert ("seed" in lacking) is not sglang.ON_GPU
    for options in ({"min_p": 0.1}, {"min_tokens": 3}):
        with pytest.raises(Unsupported):
            await collect(decode.decode(_prompt(5), replace(greedy(5), **options)))  # type: ignore[arg-type]


async def test_nothing_is_left_behind(prefill: SglangEngine, decode: SglangEngine) -> None:
    await _handed_over(prefill, decode, _prompt(40), greedy(5))
    await eventually(lambda: prefill.load().blocks_used == decode.load().blocks_used == 0)
