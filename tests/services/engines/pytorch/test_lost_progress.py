"""The embedded engine says that blocks are lost when it preempts the prompt that it has on_progress of them."""

from collections.abc import Sequence

from support.engines.embedded import Checkpoint

from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.sequence import Event, Held

BLOCK_TOKENS = 4
CHUNK = 2
LONG, RUNNING = 24, 17


def test_a_preempted_prompt_loses_its_blocks_and_tells_of_them_again(llama: Checkpoint) -> None:
    config = llama.config(
        block_tokens=BLOCK_TOKENS, kv_cache_bytes=14 * _block_bytes(llama), max_sequences=2, max_step_tokens=1 + CHUNK
    )
    core = EngineCore(config)
    events: list[Event] = []
    on_progress: list[Sequence[int]] = []
    decoding = core.new_sequence(Prompt(tuple(range(20, 20 + RUNNING))), _greedy(23), lambda event: None, hold=False)
    core.submit(decoding)
    while decoding.generated < 2:
        core.steps.step()
    prompt = core.new_sequence(Prompt(tuple(range(50, 50 + LONG))), _greedy(5), events.append, hold=True)
    prompt.on_progress = lambda blocks: on_progress.append(tuple(blocks))
    core.submit(prompt)
    while not events:
        assert core.steps.step()
    [held] = events
    assert isinstance(held, Held)
    [lost] = [index for index, blocks in enumerate(on_progress) if not blocks]
    assert lost > 0
    known = [block for blocks in on_progress[lost:] for block in blocks]
    assert tuple(known) == held.block_ids[: len(known)]
    core.abort(prompt)
    core.close()


def _greedy(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def _block_bytes(checkpoint: Checkpoint) -> int:
    config = checkpoint.plain._model.config
    return int(config.num_hidden_layers * 2 * config.num_key_value_heads * BLOCK_TOKENS * config.head_dim * 4)
