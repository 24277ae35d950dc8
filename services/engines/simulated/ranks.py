"""The data-parallel ranks of the simulated engine: each has blocks, a batch and a prefix cache of its own."""

import itertools
from collections.abc import Sequence

from baton.errors import EngineFailed
from services.engines.base import EngineLoad
from services.engines.kv_events import KvPublisher
from services.engines.memory.allocation import AllocationRules
from services.engines.memory.shared_pool import SharedPool
from services.engines.prompt import Prompt
from services.engines.simulated.blocks import Blocks, Contents
from services.engines.simulated.config import SimulatedConfig
from services.engines.simulated.scheduler import SimulatedScheduler
from services.engines.simulated.sequence import Sequence as Running
from services.engines.simulated.tokens import Vocabulary


class SimulatedRank:
    """One copy of the model. Its blocks are `number * num_blocks` and those after it of the engine's pool."""

    def __init__(
        self, number: int, config: SimulatedConfig, vocabulary: Vocabulary, memory: SharedPool, parts: "RankParts"
    ) -> None:
        self.number = number
        self._block_tokens = config.block_tokens
        self.blocks = Blocks(config.num_blocks, parts.kv_events, number)
        self.contents = Contents(memory, self.blocks, config.block_tokens)
        self.scheduler = SimulatedScheduler(config, vocabulary, self.blocks, self.contents, parts.rules)

    @property
    def requests(self) -> int:
        """The requests that run or wait."""
        return len(self.scheduler.running) + len(self.scheduler.waiting)

    def load(self) -> EngineLoad:
        """The load, without the blocks that are held for other workers."""
        waiting, running = self.scheduler.waiting, self.scheduler.running
        filled = sum(sequence.computed for sequence in running) / self._block_tokens
        return EngineLoad(
            running=len(self.scheduler.running),
            waiting=len(waiting),
            waiting_prefill_tokens=self.scheduler.prompt_tokens
            + sum(item.missing for item in waiting if isinstance(item, Running)),
            blocks_total=self.blocks.total,
            blocks_used=self.blocks.used,
            empty_blocks=max(0.0, sum(len(sequence.blocks) for sequence in running) - filled),
        )


class RankParts:
    """The parts that all ranks share: the events of their caches, and the rules of allocation."""

    def __init__(self, config: SimulatedConfig, rules: AllocationRules) -> None:
        self.kv_events = KvPublisher(config.data_parallel_ranks)
        self.rules = rules


class SimulatedRanks:
    """All ranks of an engine."""

    def __init__(self, config: SimulatedConfig, vocabulary: Vocabulary, memory: SharedPool, parts: RankParts) -> None:
        self._num_blocks = config.num_blocks
        self._turns = itertools.count()
        numbers = range(config.data_parallel_ranks)
        self.all = tuple(SimulatedRank(number, config, vocabulary, memory, parts) for number in numbers)

    @property
    def failure(self) -> EngineFailed | None:
        """The reason that the engine has failed; None if it has not."""
        return self.all[0].scheduler.failure

    def of_prompt(self, prompt: Prompt) -> SimulatedRank:
        """The rank that the prompt names; otherwise the least busy one, by turns."""
        if prompt.data_parallel_rank is not None:
            return self.all[prompt.data_parallel_rank]
        turn = next(self._turns) % len(self.all)
        return min((*self.all[turn:], *self.all[:turn]), key=lambda rank: rank.requests)

    def of_blocks(self, block_ids: Sequence[int]) -> SimulatedRank:
        """The rank that blocks belong to; of no blocks the first one."""
        return self.all[block_ids[0] // self._num_blocks if block_ids else 0]

    async def run(self, rank: SimulatedRank) -> None:
        """Runs a rank's steps until it is cancelled, or fails: then all ranks fail."""
        await rank.scheduler.run()
        assert rank.scheduler.failure is not None
        self.fail(rank.scheduler.failure)

    def fail(self, failure: EngineFailed) -> None:
        """Fails every request, now and later."""
        for rank in self.all:
            rank.scheduler.fail(failure)

    def load(self, held: int) -> EngineLoad:
        """The load of all ranks together, with `held` blocks that are held for other workers."""
        loads = [rank.load() for rank in self.all]
        return EngineLoad(
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            waiting_prefill_tokens=sum(load.waiting_prefill_tokens for load in loads),
            blocks_total=sum(load.blocks_total for load in loads),
            blocks_used=sum(load.blocks_used for load in loads),
            blocks_held=held,
            empty_blocks=sum(load.empty_blocks for load in loads),
        )
