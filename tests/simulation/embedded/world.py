"""A world of one embedded engine: requests, loans, pulls and deaths, drawn by a seed, and what must hold of them."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import structlog

from baton.errors import BatonError
from services.engines.answer import Finished
from services.engines.journal.slots import Slot
from services.engines.prompt import Prompt, Retain, Sampling, Session
from services.engines.pytorch.core import LeftDecode
from services.engines.pytorch.kv_cache.tiers.options import DiskOptions, TierOptions
from services.engines.pytorch.sequence import Event, Failed, Held, HeldDecode, State, Token, TokenSequence
from services.engines.pytorch.steps.loans import LentBlocks
from services.engines.pytorch.steps.tier_loads import BlockReservation
from simulation import entropy
from simulation.embedded.core import (
    BLOCK_TOKENS,
    LAYOUT,
    VOCABULARY,
    IdsRunner,
    Keeper,
    Killed,
    Shape,
    SimulatedMover,
    kv_of,
    next_id,
    open_core,
)
from simulation.embedded.laws import Laws
from simulation.entropy import Time

_QUIET_TURNS = 3000
_PREFIXES = 6


@dataclass(eq=False)
class Request:
    """A request, its sequence in this process, and what its reader has been told."""

    prompt: tuple[int, ...]
    tokens: int
    hold: bool
    sequence: TokenSequence | None = None
    told: list[int] = field(default_factory=list)
    end: Event | None = None
    slot: Slot | None = None


class World:
    """One run. `laws.problems` has what does not hold."""

    def __init__(self, seed: int, turns: int = 400) -> None:
        self.random = random.Random(f"embedded-{seed}")
        self.turns = turns
        self.counts: Counter[str] = Counter()
        self.asked = 0
        self._requests: list[Request] = []
        self._loans: list[tuple[LentBlocks, list[int]]] = []
        self._pulls: list[tuple[BlockReservation, tuple[int, ...]]] = []
        self._token_seconds = self.random.choice((0.0, 1e-4, 1e-3, 5e-3))  # of a step: to load is worth it, or not
        self._failures = self.random.choice((0.0, 0.0, 0.0, 0.02))  # of copies
        self.laws = Laws(may_fail=self._failures > 0)
        SimulatedMover.fails = lambda: self.random.random() < self._failures
        SimulatedMover.between = self._meanwhile

    def run(self, seed: int) -> None:
        """Runs it to its end."""
        structlog.configure(processors=[self.laws.log], cache_logger_on_first_use=False)
        entropy.enter(seed)
        try:
            with TemporaryDirectory() as folder:
                self._run(Path(folder))
        finally:
            entropy.leave()

    def _run(self, folder: Path) -> None:
        self.shape = self._draw_shape(folder)
        is_kept = self.random.random() < 0.5
        self.keeper = Keeper(self.shape.blocks, self.random.randbytes(8)) if is_kept else None
        self._start()
        if self.keeper is None:
            self._play()
        else:
            with self.keeper.counted():
                self._play()
            self.keeper.close()

    def _draw_shape(self, folder: Path) -> Shape:
        draw, blocks = self.random, self.random.choice((12, 24, 40, 80))
        tiers = None
        if draw.random() < 0.8:
            slots = draw.choice((4, blocks // 2, 2 * blocks))
            disk = DiskOptions(
                path=folder / "kv", bytes=8192 * draw.choice((8, 60)), write_queue_bytes=draw.choice((16, 128))
            )
            tiers = TierOptions(host_bytes=slots * LAYOUT.block_bytes, disk=draw.choice((None, disk)))
        return Shape(blocks, draw.choice((8, 32, 128)), draw.choice((2, 6, 16)), draw.choice((0.3, 0.7, 1.0)), tiers)

    def _start(self) -> None:
        """A process begins. It tells of all that it has found."""
        self.core = open_core(self.shape, self.keeper, self.laws.hear, self._runner)
        self.laws.core = self.core
        self.laws.began()

    def _runner(self, words: Any) -> IdsRunner:
        self.words = self.laws.words = words
        return IdsRunner(words, self.laws.check, self.random, self._token_seconds)

    # What happens.

    def _play(self) -> None:
        for _ in range(self.turns):
            self._try(self._turn)
        self._try(self._quieten)
        self.laws.look()
        self.core.close()

    def _try(self, act: Any) -> None:
        try:
            act()
        except Killed:
            self._restart()
        except BatonError as error:
            self.counts[type(error).__name__] += 1
        except Exception as error:
            import traceback

            self.laws.problems.append("".join(traceback.format_exception(error)[-6:]))

    def _turn(self) -> None:
        Time.now += self.random.choice((1e-4, 1e-3, 1e-2))
        draw = self.random.random()
        if draw < 0.55:
            self.core.steps.step()
        elif draw < 0.75:
            self._run_mover()
        else:
            self._client()

    def _meanwhile(self) -> None:
        """The engine's thread goes on while a load copies. It does not die there."""
        if self.keeper is not None and self.keeper.writes_left >= 0:
            return
        SimulatedMover.is_loading = False
        for _ in range(self.random.choice((0, 0, 1, 3))):
            self._try(self.random.choice((self.core.steps.step, self._abort, self._give_back, self._lend)))
        SimulatedMover.is_loading = True

    def _run_mover(self) -> None:
        if self.core.tiers is None:
            return
        busy = [mover for mover in self.core.tiers._movers._threads if mover.jobs]  # type: ignore[attr-defined]
        if busy:
            self.random.choice(busy).run_next()

    def _client(self) -> None:
        acts = (
            (30, self._ask), (6, self._abort), (8, self._lend), (8, self._give_back), (4, self._yield),
            (6, self._reserve), (8, self._end_pull), (2, self._end_session), (2, self._die_soon), (6, self.laws.look),
        )  # fmt: skip
        weights, choices = zip(*acts, strict=True)
        self.random.choices(choices, weights)[0]()

    def _prompt(self) -> tuple[int, ...]:
        """One of a few beginnings, and something of its own."""
        draw = random.Random(self.random.randrange(_PREFIXES))
        most = (self.shape.blocks - 1) * BLOCK_TOKENS - 60
        beginning = [draw.randrange(VOCABULARY) for _ in range(draw.choice((8, 30, 90)))]
        own = [self.random.randrange(VOCABULARY) for _ in range(self.random.choice((1, 1, 7, 25)))]
        return tuple([*beginning, *own][: max(2, most)])

    def _ask(self) -> None:
        if len([one for one in self._requests if one.end is None]) > 20:
            return
        prompt = self._prompt()
        request = Request(prompt, self.random.choice((1, 2, 12, 40)), hold=self.random.random() < 0.3)
        session = None
        if self.random.random() < 0.4:
            key = bytes([self.random.randrange(5)])
            session = Session(key, ends=self.random.random() < 0.2, next_in_seconds=self.random.choice((0.0, 5.0)))
        retain = Retain(5.0, tenant=b"t") if self.random.random() < 0.2 else None
        self._submit(request, Prompt(prompt, retain=retain, session=session))

    def _submit(self, request: Request, prompt: Prompt, pulled: BlockReservation | None = None) -> None:
        sampling = Sampling(request.tokens, temperature=0.0, ignore_eos=True)
        sequence = self.core.new_sequence(prompt, sampling, partial(self._tell, request), hold=request.hold)
        request.sequence = sequence
        journal = self.core.journal
        if journal is not None and not request.hold:
            record = len(request.prompt).to_bytes(4, "little") + request.tokens.to_bytes(4, "little")
            request.slot = sequence.slot = journal.open_slot(record, prompt.context)
        self._requests.append(request)
        self.asked += 1
        self.laws.name(prompt.context)
        self.core.submit(sequence) if pulled is None else self.core.submit_pulled(sequence, pulled)

    def _tell(self, request: Request, event: Event) -> None:
        self.counts[type(event).__name__] += 1
        if request.sequence is not None and request.sequence.loaded_blocks and not isinstance(event, Token):
            self.counts["loaded"] += 1
        if isinstance(event, Token):
            request.told.append(event.token_id)
            self.laws.name((*request.prompt, *request.told))
            return
        request.end = event
        if isinstance(event, Finished) and len(request.told) != request.tokens:
            self.laws.problems.append(f"AnswersAreRight: {len(request.told)} ids of {request.tokens}")
        if request.told != self._answer(request.prompt, len(request.told)):
            self.laws.problems.append("AnswersAreRight: other ids")
        self._free_slot(request)

    def _free_slot(self, request: Request) -> None:
        if request.slot is not None and self.core.journal is not None:
            self.core.journal.free_slot(request.slot)
        request.slot = None

    @staticmethod
    def _answer(prompt: Sequence[int], count: int) -> list[int]:
        ids = list(prompt)
        value = kv_of(ids)
        for _ in range(count):
            ids.append(next_id(value[-1]))
            value = kv_of(ids)
        return ids[len(prompt) :]

    def _abort(self) -> None:
        """A client leaves, or a reader of held KV is done."""
        living = [one for one in self._requests if one.sequence and one.sequence.state is not State.DONE]
        if living:
            request = self.random.choice(living)
            self._check_held(request)
            assert request.sequence is not None
            self.core.abort(request.sequence)
            request.end = request.end or Failed(BatonError("aborted"))
            self._free_slot(request)

    def _check_held(self, request: Request) -> None:
        held = request.end.held if isinstance(request.end, HeldDecode) else request.end
        if isinstance(held, Held) and request.sequence and request.sequence.state is State.HELD:
            self.laws.check(kv_of(request.sequence.tokens), list(held.block_ids), held.num_tokens)

    def _yield(self) -> None:
        running = [one for one in self._requests if one.end is None and one.sequence and not one.hold]
        if running:
            sequence = self.random.choice(running).sequence
            assert sequence is not None
            self.core.yield_next(sequence)

    def _lend(self) -> None:
        loans = self.core.scheduler.loans
        running = [one.sequence for one in self._requests if one.end is None and one.sequence]
        if self.random.random() < 0.5 and running:
            sequence = self.random.choice(running)
            lent = loans.lend(sequence, self.random.choice((10, 1000)))
            if lent is not None:
                self._loans.append((lent, kv_of(sequence.tokens)))
            return
        ids = self._prompt()
        hashes = self.laws.name(ids)
        core = self.core

        def got(lent: LentBlocks | None) -> None:
            if lent is not None and core is self.core:
                self.counts["lent"] += 1
                self._loans.append((lent, kv_of(ids)))

        loans.lend_all(hashes, got)

    def _give_back(self) -> None:
        if self._loans:
            lent, kv = self._loans.pop(self.random.randrange(len(self._loans)))
            self.laws.check(kv, list(lent.block_ids), lent.num_tokens)
            self.core.scheduler.loans.give_back(lent)

    def _reserve(self) -> None:
        ids = self._prompt()
        count = self.random.choice((len(ids), self.random.randint(1, len(ids))))
        hashes = self.laws.name(ids)[: count // BLOCK_TOKENS]
        reservation = BlockReservation(count, hashes, lambda _error: self.counts.update(["reserved"]))
        self.core.reserve(reservation)
        self._pulls.append((reservation, ids))

    def _end_pull(self) -> None:
        """KV for a reservation has come, or not. Then its request runs, the cache keeps it, or nobody wants it."""
        if not self._pulls:
            return
        reservation, ids = self._pulls.pop(self.random.randrange(len(self._pulls)))
        if reservation.state is not State.RESERVED or not self._is_settled(reservation):
            self.core.abort(reservation)
            return
        kv, first = kv_of(ids), reservation.cached_blocks * BLOCK_TOKENS
        self.laws.check(kv, reservation.blocks, first)
        for index in range(first, reservation.num_tokens):
            self.words[reservation.blocks[index // BLOCK_TOKENS], index % BLOCK_TOKENS] = kv[index]
        draw = self.random.random()
        if draw < 0.6:
            emitted = self._answer(ids, self.random.choice((1, 1, 5)))
            request = Request(ids, self.random.choice((5, 12)), hold=False, told=emitted)
            self._submit(request, Prompt(ids, emitted=tuple(emitted)), reservation)
        elif draw < 0.8:
            self.core.cache(reservation, self.random.randint(0, len(reservation.blocks)))
        else:
            self.core.abort(reservation)

    def _is_settled(self, reservation: BlockReservation) -> bool:
        """True once its blocks may be written."""
        waiting = self.core.tiers._waiting if self.core.tiers is not None else ()
        return not {job.block for one in waiting for job in one.demotions} & set(reservation.blocks)

    def _end_session(self) -> None:
        self.core.end_session(bytes([self.random.randrange(5)]))

    # Deaths.

    def _die_soon(self) -> None:
        if self.keeper is not None:
            self.keeper.writes_left = self.random.choice((1, 2, 3, 5, 20))

    def _restart(self) -> None:
        """The next process of the worker takes over what this one has left."""
        self.counts["deaths"] += 1
        self.laws.has_died = True
        old = self._requests
        self._requests, self._loans, self._pulls = [], [], []
        if self.core.tiers is not None:
            self.core.tiers.close()
        if self.keeper is not None and self.random.random() < 0.3:
            for block in self.random.sample(range(1, self.shape.blocks), self.shape.blocks // 6):
                self.keeper.damage(block)
        self._start()
        for left in self.core.pop_decodes():
            self._take_over(left, old)

    def _take_over(self, left: LeftDecode, old: list[Request]) -> None:
        found = left.found
        length, tokens = (int.from_bytes(found.record[at : at + 4], "little") for at in (0, 4))
        ids = tuple(found.ids)
        prompt, emitted = ids[:length], ids[length:]
        before = next((one for one in old if one.slot is not None and one.slot.index == found.slot.index), None)
        if list(emitted) != self._answer(prompt, len(emitted)) or (before and len(before.told) > len(emitted)):
            self.laws.problems.append("ResumptionsGoOn: other ids, or fewer than were told")
        self.counts[f"left {found.kv}"] += 1
        request = Request(prompt, tokens, False, told=list(emitted), slot=found.slot)
        sampling = Sampling(tokens, temperature=0.0, ignore_eos=True)
        source = Prompt(prompt, emitted=emitted)
        sequence = self.core.new_sequence(source, sampling, partial(self._tell, request), hold=False)
        request.sequence, sequence.slot = sequence, found.slot
        self._requests.append(request)
        self.laws.name(ids)
        if left.reservation is not None:
            self.laws.check(kv_of(ids), left.reservation.blocks, left.reservation.num_tokens)
        if left.reservation is not None and emitted:
            self.core.submit_pulled(sequence, left.reservation)
            return
        # As services/resume does: before the first token the prefix cache has what is of use.
        found.slot.revoke()
        if left.reservation is not None:
            self.core.abort(left.reservation)
        self.core.submit(sequence)

    def _quieten(self) -> None:
        """All that was asked for ends; then nothing is left."""
        while self._loans:
            self._give_back()
        for turn in range(_QUIET_TURNS):
            Time.now += 1e-2
            self.core.steps.step()
            self._run_mover()
            while self._pulls:
                self._end_pull()
            for one in self._requests:
                if one.sequence and one.sequence.state is State.HELD:
                    self._check_held(one)
                    self.core.abort(one.sequence)
                    self._free_slot(one)
            while self._loans:
                self._give_back()
            if turn > 50 and all(one.end is not None for one in self._requests) and not self._moves():
                break
        self.core.steps.finish_step()
        self.laws.nothing_is_left(sum(one.end is None for one in self._requests))

    def _moves(self) -> bool:
        tiers = self.core.tiers
        return tiers is not None and any(mover.jobs for mover in tiers._movers._threads)  # type: ignore[attr-defined]
