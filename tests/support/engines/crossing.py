"""Two workers that hold KV for each other, for model checking: the engines' schedulers without their models."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

from services.engines.memory.allocation import AllocationRules
from services.engines.memory.shared_pool import SharedPool
from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.kv_cache.blocks import BlockPool, HashChain
from services.engines.pytorch.sampling.sampling import SamplerState
from services.engines.pytorch.sequence import State, TokenSequence
from services.engines.pytorch.steps.scheduler import Scheduler as PyTorchScheduler
from services.engines.pytorch.steps.scheduler import SchedulerLimits
from services.engines.pytorch.steps.tier_loads import BlockReservation
from services.engines.simulated.blocks import Blocks, Contents
from services.engines.simulated.config import SimulatedConfig
from services.engines.simulated.kv import Claim
from services.engines.simulated.scheduler import SimulatedScheduler
from services.engines.simulated.sequence import Sequence as SimulatedSequence
from services.engines.simulated.tokens import TokenStream, vocabulary_of

BLOCK_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Crossing:
    """A request that is prefilled on one worker, 0 or 1, and decoded on the other."""

    owner: int
    prompt_tokens: int
    answer_tokens: int = 2

    @property
    def reader(self) -> int:
        return 1 - self.owner


@dataclass(frozen=True, slots=True)
class Setting:
    """The case to explore. Without `gives_up` a reservation waits forever."""

    requests: tuple[Crossing, ...]
    pool_blocks: int
    rules: AllocationRules
    gives_up: bool = True
    cancels: bool = False


class Side(Protocol):
    """One worker: its scheduler, and what the engine around it does. Requests are known by their numbers."""

    def prefill(self, request: int, crossing: Crossing) -> None:
        """Queues a prompt whose KV will be held."""

    def run_whole(self, request: int, crossing: Crossing) -> None:
        """Queues a prompt that is prefilled and decoded here."""

    def reserve(self, request: int, crossing: Crossing) -> None:
        """Queues the reservation of blocks to pull into."""

    def join(self, request: int, crossing: Crossing) -> None:
        """Starts a request whose KV has arrived."""

    def is_held(self, request: int) -> bool: ...

    def is_granted(self, request: int) -> bool: ...

    def is_held_up(self, request: int) -> bool: ...

    def has_ended(self, request: int) -> bool: ...

    def drop(self, request: int) -> None:
        """Frees everything that a request has on this worker."""

    def step(self) -> None: ...

    @property
    def used(self) -> int: ...

    def state(self) -> Hashable: ...


@dataclass
class PyTorchSide:
    """The embedded engine's scheduler; what the model would compute is a token that ends nothing."""

    setting: Setting
    items: dict[int, TokenSequence | BlockReservation] = field(default_factory=dict)
    granted: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.setting.pool_blocks + 1)
        limits = SchedulerLimits(8, 64, 16, max_context_tokens=4096, block_tokens=BLOCK_TOKENS, prefix_cache=False)
        self.scheduler = PyTorchScheduler(self.pool, limits, self.setting.rules)

    def prefill(self, request: int, crossing: Crossing) -> None:
        self.items[request] = self._sequence(crossing, 0, hold=True)
        self.scheduler.enqueue(self.items[request])

    def run_whole(self, request: int, crossing: Crossing) -> None:
        self.items[request] = self._sequence(crossing, 1, hold=False)
        self.scheduler.enqueue(self.items[request])

    def reserve(self, request: int, crossing: Crossing) -> None:
        reservation = BlockReservation(crossing.prompt_tokens, [], lambda error: self.granted.add(request))
        self.items[request] = reservation
        self.scheduler.enqueue(reservation)

    def join(self, request: int, crossing: Crossing) -> None:
        reservation = self.items[request]
        assert isinstance(reservation, BlockReservation)
        sequence = self.items[request] = self._sequence(crossing, 1, hold=False)
        sequence.computed = crossing.prompt_tokens
        self.scheduler.add_reserved(reservation, sequence)

    def is_held(self, request: int) -> bool:
        return self.items[request].state is State.HELD

    def is_granted(self, request: int) -> bool:
        return self.items[request].state is State.RESERVED

    def is_held_up(self, request: int) -> bool:
        reservation = self.items[request]
        return isinstance(reservation, BlockReservation) and self.scheduler.is_held_up(reservation)

    def has_ended(self, request: int) -> bool:
        return request in self.ended

    def drop(self, request: int) -> None:
        self.scheduler.remove(self.items.pop(request))

    def step(self) -> None:
        for chunk in self.scheduler.schedule():
            samples = chunk.samples
            chunk.sequence.computed = chunk.end
            if samples:
                self._append(chunk.sequence)

    @property
    def used(self) -> int:
        return self.pool.used

    def state(self) -> Hashable:
        names = {id(item): request for request, item in self.items.items()}
        running = [(names[id(s)], s.computed, len(s.tokens)) for s in self.scheduler.running]
        waiting = [(names[id(item)], item.reserves, item.passed) for item in self.scheduler.waiting]
        blocks = sorted((request, item.state.value, len(item.blocks)) for request, item in self.items.items())
        return tuple(running), tuple(waiting), tuple(blocks), self.pool.used

    def _append(self, sequence: TokenSequence) -> None:
        sequence.tokens.append(0)
        if sequence.hold:
            self.scheduler.hold(sequence)
        elif sequence.generated >= sequence.sampling.max_tokens:
            self.scheduler.remove(sequence)
            self.ended |= {request for request, item in self.items.items() if item is sequence}

    def _sequence(self, crossing: Crossing, emitted: int, *, hold: bool) -> TokenSequence:
        prompt, sampling = _prompt(crossing, emitted), _sampling(crossing)
        return TokenSequence(
            prompt=prompt,
            sampling=sampling,
            hold=hold,
            chain=HashChain("", BLOCK_TOKENS),
            sampler=SamplerState(prompt, sampling, frozenset()),
            sink=lambda event: None,
            tokens=list(prompt.context),
        )


@cache
def _config(num_blocks: int) -> SimulatedConfig:
    return SimulatedConfig(num_blocks=num_blocks, block_tokens=BLOCK_TOKENS, block_bytes=64)


_VOCABULARY = vocabulary_of(SimulatedConfig())
# The content of blocks does not affect scheduling.
_MEMORY = SharedPool(64, 64)


@dataclass
class SimulatedSide:
    """The simulated engine's scheduler, stepped by hand. Each request has a prefix of its own, so none is shared."""

    setting: Setting
    items: dict[int, SimulatedSequence | Claim] = field(default_factory=dict)
    held: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = _config(self.setting.pool_blocks)
        self.blocks = Blocks(config.num_blocks)
        self.vocabulary = _VOCABULARY
        contents = Contents(_MEMORY, self.blocks, BLOCK_TOKENS)
        self.scheduler = SimulatedScheduler(config, self.vocabulary, self.blocks, contents, self.setting.rules)

    def prefill(self, request: int, crossing: Crossing) -> None:
        sequence = self.items[request] = self._sequence(request, crossing, 0)
        sequence.held = True
        self.scheduler.enqueue(sequence)

    def run_whole(self, request: int, crossing: Crossing) -> None:
        self.items[request] = self._sequence(request, crossing, 1)
        self.scheduler.enqueue(self.items[request])

    def reserve(self, request: int, crossing: Crossing) -> None:
        self.items[request] = Claim(-(-crossing.prompt_tokens // BLOCK_TOKENS), [])
        self.scheduler.enqueue(self.items[request])

    def join(self, request: int, crossing: Crossing) -> None:
        claim, sequence = self.items[request], self._sequence(request, crossing, 1)
        sequence.adopt(claim.blocks, crossing.prompt_tokens, 0)
        self.items[request] = sequence
        self.scheduler.enqueue(sequence)

    def is_held(self, request: int) -> bool:
        item = self.items[request]
        return isinstance(item, SimulatedSequence) and item.held and item.generated > 0

    def is_granted(self, request: int) -> bool:
        item = self.items[request]
        return isinstance(item, Claim) and item.changed.is_set()

    def is_held_up(self, request: int) -> bool:
        claim = self.items[request]
        return isinstance(claim, Claim) and self.scheduler.is_held_up(claim)

    def has_ended(self, request: int) -> bool:
        item = self.items.get(request)
        return isinstance(item, SimulatedSequence) and item.finish is not None

    def drop(self, request: int) -> None:
        self.scheduler.drop(self.items.pop(request))

    def step(self) -> None:
        self.scheduler._admit()
        for sequence, count in self.scheduler._plan():
            if sequence in self.scheduler.running:
                self.scheduler._advance(sequence, count)
        for item in self.items.values():
            if isinstance(item, SimulatedSequence) and item.finish is not None:
                self.scheduler.drop(item)

    @property
    def used(self) -> int:
        return self.blocks.used

    def state(self) -> Hashable:
        names = {id(item): request for request, item in self.items.items()}
        running = [(names[id(s)], s.computed, len(s.ids)) for s in self.scheduler.running]
        waiting = [(names[id(item)], item.reserves, item.passed) for item in self.scheduler.waiting]
        blocks = sorted((request, len(item.blocks), self.has_ended(request)) for request, item in self.items.items())
        return tuple(running), tuple(waiting), tuple(blocks), self.blocks.used

    def _sequence(self, request: int, crossing: Crossing, emitted: int) -> SimulatedSequence:
        prompt, sampling = _prompt(crossing, emitted, request), _sampling(crossing)
        stream = TokenStream(self.vocabulary, sampling, 0.0, prompt.emitted)
        sequence = SimulatedSequence(prompt, sampling, stream, BLOCK_TOKENS)
        sequence.prepare()
        return sequence


@dataclass
class CrossingWorld:
    """Two sides, and requests on their way: held, reserved, confirmed, decoded; or given up and run whole."""

    setting: Setting
    build: Callable[[Setting], Side]

    def __post_init__(self) -> None:
        self.sides = (self.build(self.setting), self.build(self.setting))
        self.phases = ["new"] * len(self.setting.requests)
        self.runs_on: dict[int, int] = {}

    @property
    def is_done(self) -> bool:
        return all(phase == "done" for phase in self.phases)

    @property
    def used(self) -> int:
        return sum(side.used for side in self.sides)

    def actions(self) -> Sequence[str]:
        found = ["step 0", "step 1"]
        for request, phase in enumerate(self.phases):
            found += [f"{action} {request}" for action in self._enabled(request, phase)]
        return found

    def do(self, action: str) -> None:
        name, _, number = action.partition(" ")
        if name == "step":
            self.sides[int(number)].step()
        else:
            getattr(self, f"_{name}")(int(number))
        self._look()

    def state(self) -> Hashable:
        return tuple(self.phases), tuple(sorted(self.runs_on.items())), tuple(side.state() for side in self.sides)

    def _enabled(self, request: int, phase: str) -> list[str]:
        following = {"new": ["arrive"], "held": ["reserve"], "granted": ["confirm"], "pulled": ["join"]}
        found = list(following.get(phase, []))
        reader = self.sides[self.setting.requests[request].reader]
        if self.setting.gives_up and phase == "reserving" and reader.is_held_up(request):
            found += ["run_here", "run_there"]
        if self.setting.cancels and phase not in ("new", "done"):
            found.append("cancel")
        return found

    def _arrive(self, request: int) -> None:
        crossing = self.setting.requests[request]
        self.sides[crossing.owner].prefill(request, crossing)
        self.phases[request] = "prefilling"

    def _reserve(self, request: int) -> None:
        crossing = self.setting.requests[request]
        self.sides[crossing.reader].reserve(request, crossing)
        self.phases[request] = "reserving"

    def _confirm(self, request: int) -> None:
        self.sides[self.setting.requests[request].owner].drop(request)
        self.phases[request] = "pulled"

    def _join(self, request: int) -> None:
        crossing = self.setting.requests[request]
        self.sides[crossing.reader].join(request, crossing)
        self._run(request, crossing.reader)

    def _run_here(self, request: int) -> None:
        self._run_whole(request, self.setting.requests[request].reader)

    def _run_there(self, request: int) -> None:
        self._run_whole(request, self.setting.requests[request].owner)

    def _run_whole(self, request: int, side: int) -> None:
        for one in self.sides:
            one.drop(request)
        self.sides[side].run_whole(request, self.setting.requests[request])
        self._run(request, side)

    def _run(self, request: int, side: int) -> None:
        self.runs_on[request] = side
        self.phases[request] = "running"

    def _cancel(self, request: int) -> None:
        for side in self.sides:
            if request in side.items:  # type: ignore[attr-defined]
                side.drop(request)
        self.runs_on.pop(request, None)
        self.phases[request] = "done"

    def _look(self) -> None:
        """Updates the requests from the state of the workers."""
        for request, phase in enumerate(self.phases):
            crossing = self.setting.requests[request]
            if phase == "prefilling" and self.sides[crossing.owner].is_held(request):
                self.phases[request] = "held"
            elif phase == "reserving" and self.sides[crossing.reader].is_granted(request):
                self.phases[request] = "granted"
            elif phase == "running" and self.sides[self.runs_on[request]].has_ended(request):
                del self.runs_on[request]
                self.phases[request] = "done"


def _prompt(crossing: Crossing, emitted: int, first: int = 0) -> Prompt:
    return Prompt((first + 1,) * crossing.prompt_tokens, (0,) * emitted)


def _sampling(crossing: Crossing) -> Sampling:
    return Sampling(max_tokens=crossing.answer_tokens, temperature=0.0, ignore_eos=True, seed=1)
