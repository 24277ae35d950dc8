"""Engines that die by SIGKILL amid journaled decodes; each goes on with the decodes that the one before has left.

`python -m support.engines.dying_decodes FOLDER KILLS [--at-writes] [--broken] [--seed=N]` with a checkpoint's folder.
An engine is killed after a random time on the processor, counted from its start or, every other one, from when it has
taken over; with `--at-writes` at the k-th write to the journal or of a seal after its start, for every k from N on:
before it, within it, and after it. `--broken` plants an error: the blocks that are taken over have lost their KV. The
last line of the output is JSON.
"""

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.engines.dying_engine import MAX_TOKENS, Death, config, prompts, serve

from services.engines.context import KeptMemory
from services.engines.journal.journal import FoundDecode
from services.engines.journal.slots import Slot
from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.kv_cache import kept_cache
from services.engines.pytorch.kv_cache.kept_cache import KeptCache
from services.engines.pytorch.sequence import Event, Token, TokenSequence
from services.keeper.client import KeeperClient
from services.keeper.conversation import Conversation
from services.keeper.memory import KeptDescriptors
from services.keeper.messages import Answer, pair

_TOGETHER = 4
_ROUNDS = 1000

Ids = Sequence[int]


@dataclass(slots=True)
class Report:
    """The kills, the decodes that were taken over, and what was found."""

    kills: int = 0
    ended: int = 0  # engines that ended before they were to die
    taken_over: int = 0
    complete: int = 0  # of those, with the KV of all ids but the last
    computed_again: int = 0  # ids of the others
    answers: int = 0
    wrong: int = 0
    problems: list[str] = field(default_factory=list)


def _sampling(index: int) -> Sampling:
    temperature = 0.0 if index % 2 else 0.8
    return Sampling(max_tokens=MAX_TOKENS, temperature=temperature, seed=index, ignore_eos=True)


@dataclass(slots=True)
class _Running:
    """The decodes of an engine, by the number of their prompt."""

    core: EngineCore
    tell: Callable[..., None]
    sequences: dict[int, tuple[TokenSequence, list[Event]]] = field(default_factory=dict)

    def take_over(self) -> None:
        for left in self.core.pop_decodes():
            found = left.found
            index, prompt = int(found.record), prompts()[int(found.record)]
            emitted = tuple(found.ids[len(prompt) :])
            assert tuple(found.ids[: len(prompt)]) == prompt
            self.tell(taken=index, ids=emitted, computed=found.computed, length=len(found.ids))
            sequence = self._sequence(index, emitted, found.slot)
            if left.reservation is not None and emitted:
                self.core.submit_pulled(sequence, left.reservation)
                continue
            if left.reservation is not None:
                found.slot.revoke()
                self.core.abort(left.reservation)
            self.core.submit(sequence)

    def begin(self, index: int) -> None:
        prompt = prompts()[index]
        slot = self.core.journal and self.core.journal.open_slot(str(index).encode(), prompt)
        self.core.submit(self._sequence(index, (), slot))

    def _sequence(self, index: int, emitted: tuple[int, ...], slot: Slot | None) -> TokenSequence:
        events: list[Event] = []
        prompt = Prompt(prompts()[index], emitted)
        sequence = self.core.new_sequence(prompt, _sampling(index), events.append, hold=False)
        sequence.slot = slot
        self.sequences[index] = sequence, events
        return sequence

    def step(self) -> None:
        self.core.steps.step()
        for index, (sequence, events) in tuple(self.sequences.items()):
            if not events or isinstance(events[-1], Token):
                continue
            self.tell(index=index, answer=sequence.tokens[len(prompts()[index]) :])
            if sequence.slot is not None and self.core.journal is not None:
                self.core.journal.free_slot(sequence.slot)
            del self.sequences[index]

    def run(self, waiting: list[int]) -> None:
        while waiting or self.sequences:
            while waiting and len(self.sequences) < _TOGETHER:
                index = waiting.pop()
                if index not in self.sequences:
                    self.begin(index)
            self.step()


def _live(folder: str, client: KeeperClient, output: int, seed: int, death: Death) -> None:
    def tell(**content: object) -> None:
        os.write(output, json.dumps(content).encode() + b"\n")

    with torch.inference_mode():
        if death.write is not None:
            _die_at(*death.write)
        core = EngineCore(config(folder), kept=KeptMemory(client, weights=True, kv=True))
        running, pool = _Running(core, tell), core.scheduler._pool
        assert core.journal is not None
        running.take_over()
        if death.is_ready_first:
            signal.setitimer(signal.ITIMER_PROF, death.seconds)
        for number in range(_ROUNDS):
            running.run(random.Random(seed + number).sample(range(len(prompts())), len(prompts())))
            tell(
                leaked=pool.total - len(pool._empty) - len(pool._emptied) - len(pool._idle),
                used=pool.used,
                reserved=core.scheduler.reserved,
                open=core.journal._num_slots - len(core.journal._free),
            )


def _die_at(write: int, cut: float) -> None:
    """Dies in this process' write of that number to the journal or of a seal, after that part of it."""
    count, put, seal = 0, Slot._put, KeptCache._write

    def dies(number_of_bytes: int) -> int | None:
        nonlocal count
        count += 1
        return None if count <= write else int(number_of_bytes * cut)

    def _put(self: Slot, at: int, data: bytes) -> None:
        size = dies(len(data))
        put(self, at, data if size is None else data[:size])
        if size is not None:
            os.kill(os.getpid(), signal.SIGKILL)

    def _write(self: KeptCache, block: int, data: bytes) -> None:
        size = dies(len(data))
        if size is not None:
            self._seals[block * len(data) : block * len(data) + size] = data[:size]
            os.kill(os.getpid(), signal.SIGKILL)
        seal(self, block, data)

    patched: Any = Slot
    patched._put, KeptCache._write = _put, _write  # type: ignore[method-assign]


def _break() -> None:
    recover = KeptCache.recover

    def loses(self: KeptCache, decodes: Sequence[FoundDecode] = ()) -> Mapping[int, bytes]:
        found = recover(self, decodes)
        for one in decodes:
            self._memory.tensor[one.blocks] = 0
        return found

    KeptCache.recover = loses  # type: ignore[method-assign]


def _run_one(folder: str, kept: KeptDescriptors, death: Death, seed: int) -> tuple[list[str], bool]:
    """The lines of an engine, and whether it was killed."""
    own, end = pair()
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        own.close()
        os.close(read)
        signal.setitimer(signal.ITIMER_PROF, 0.0 if death.is_ready_first else death.seconds)
        try:
            _live(folder, KeeperClient(end), write, seed, death)
        except BaseException as error:
            os.write(write, json.dumps({"failed": repr(error)}).encode() + b"\n")
            os._exit(1)
        os._exit(0)
    end.close()
    os.close(write)
    lines = serve(pid, Conversation(own, kept, Answer(), pid), read)
    return lines, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) in (-signal.SIGKILL, -signal.SIGPROF)


def _judge(report: Report, lines: Sequence[str], expected: Sequence[Ids]) -> None:
    for line in lines:
        if not line.endswith("}"):
            continue  # cut by the death
        said = json.loads(line)
        if "taken" in said:
            report.taken_over += 1
            report.complete += said["computed"] == said["length"] - 1
            report.computed_again += said["length"] - 1 - said["computed"]
            report.wrong += said["ids"] != expected[said["taken"]][: len(said["ids"])]
        if "answer" in said:
            report.answers += 1
            report.wrong += said["answer"] != expected[said["index"]]
        if "failed" in said or any(said.get(name) for name in ("leaked", "used", "reserved", "open")):
            report.problems.append(line)


def _schedule(kills: int, seed: int, *, at_writes: bool) -> list[Death]:
    if not at_writes:
        chosen = random.Random(seed)
        return [Death(chosen.uniform(0.05, 0.6), is_ready_first=bool(number % 2)) for number in range(kills)]
    cuts = [0.0, 0.13, 0.5, 1.0]
    return [Death(write=(seed + number // len(cuts), cuts[number % len(cuts)])) for number in range(kills)]


def _expected(folder: str) -> list[Ids]:
    found: list[Ids] = [[] for _ in prompts()]

    def tell(index: int, answer: Ids) -> None:
        found[index] = answer

    with torch.inference_mode():
        _Running(EngineCore(config(folder)), partial(tell)).run(list(range(len(found))))
    return found


def main() -> None:
    """Kills engines, and prints what was found."""
    folder, kills, *options = sys.argv[1:]
    torch.set_num_threads(1)
    kept_cache._log.warning = lambda *_, **__: None
    expected = _expected(folder)
    if "--broken" in options:
        _break()
    report, kept = Report(), KeptDescriptors()
    [seed, *_] = [int(each.removeprefix("--seed=")) for each in options if each.startswith("--seed=")] or [0]
    for number, death in enumerate(_schedule(int(kills), seed, at_writes="--at-writes" in options)):
        lines, was_killed = _run_one(folder, kept, death, number + seed * 10_000)
        report.kills += was_killed
        report.ended += not was_killed
        _judge(report, lines, expected)
    print(json.dumps(asdict(report)))


if __name__ == "__main__":
    assert Path(sys.argv[1]).is_dir()
    main()
