"""Engines that die by SIGKILL, one after the other, on kept memory; each goes on with what the one before has left.

`python -m support.engines.dying_engine FOLDER KILLS [--at-writes] [--broken] [--seed=N]` with a checkpoint's folder. It
forks an engine for each kill, from a process without threads. Without `--at-writes` it is killed after a random time on
the processor, counted from its start or, every other one, from when it is ready; with it, at the k-th write of a seal
after its start, for every k from N on: before it, within it, and after it, and another engine then generates
everything. `--broken` plants an error: seals are neither erased nor checked. The last line of the output is JSON.
"""

import json
import os
import random
import select
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from services.engines.context import KeptMemory
from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.kv_cache import kept_cache
from services.engines.pytorch.kv_cache.kept_cache import KeptCache
from services.engines.pytorch.sequence import Event, Token
from services.keeper.client import KeeperClient
from services.keeper.conversation import Conversation
from services.keeper.memory import KeptDescriptors
from services.keeper.messages import Answer, pair

MAX_TOKENS = 20
_TOGETHER = 4
_ROUNDING = 1e-3
_SECONDS = 60.0


Answered = list[tuple[int, float]]
"""An answer: its ids, and the log probability of each."""


@dataclass(slots=True)
class Report:
    """The kills, and what was found after them."""

    kills: int = 0
    answers: int = 0
    wrong: int = 0
    recovered: int = 0
    ended: int = 0  # engines that ended before they were to die
    problems: list[str] = field(default_factory=list)


def prompts() -> list[tuple[int, ...]]:
    """Prompts of which several begin alike."""
    chosen = random.Random(5)
    roots = [[chosen.randrange(3, 300) for _ in range(40)] for _ in range(3)]
    return [
        (
            *roots[index % 3][: chosen.randrange(16, 40)],
            *(chosen.randrange(3, 300) for _ in range(chosen.randrange(30))),
        )
        for index in range(12)
    ]


def config(folder: str) -> PyTorchConfig:
    """An engine whose pool is far too small for all prompts, so that blocks change owners all the time."""
    values = {"model": folder, "device": "cpu", "execution": "fused", "threads": 1, "block_tokens": 8}
    sizes = {"max_sequences": _TOGETHER, "max_context_tokens": 128, "kv_cache_bytes": 32 * 6144}
    return PyTorchConfig.model_validate({**values, **sizes})


def generate(core: EngineCore, emitted: dict[int, Sequence[int]], ended: Callable[[int, Answered], None]) -> None:
    """Runs these prompts, a few at a time, each after the ids of its answer that there are already."""
    known, waiting, running = prompts(), list(emitted), dict[int, list[Event]]()
    while waiting or running:
        while waiting and len(running) < _TOGETHER:
            index = waiting.pop()
            running[index] = []
            sampling = Sampling(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
            prompt = Prompt(known[index], tuple(emitted[index]))
            core.submit(core.new_sequence(prompt, sampling, running[index].append, hold=False))
        assert core.steps.step()
        for index, events in tuple(running.items()):
            if events and not isinstance(events[-1], Token):
                ended(index, _answered([event for event in events if isinstance(event, Token)]))
                del running[index]


def _answered(tokens: Sequence[Token]) -> Answered:
    return [(token.token_id, token.logprob.logprob if token.logprob else 0.0) for token in tokens]


def _is_right(found: Answered, expected: Answered) -> bool:
    """The ids must be equal, and the log probabilities but for rounding: KV of another prefix changes them first.

    `found` may have been continued from the beginning of `expected`.
    """
    pairs = list(zip(found, expected[-len(found) :], strict=True))
    return bool(found) and all(one[0] == other[0] and abs(one[1] - other[1]) < _ROUNDING for one, other in pairs)


def _live(
    folder: str, client: KeeperClient, output: int, seed: int, death: "Death", expected: Sequence[Answered]
) -> None:
    """An engine, until it is killed; without a time or a write at which it is, until it has generated everything."""

    def tell(**content: object) -> None:
        os.write(output, json.dumps(content).encode() + b"\n")

    with torch.inference_mode():
        core = EngineCore(config(folder), kept=KeptMemory(client, weights=True, kv=True))
        pool = core.scheduler._pool
        tell(recovered=len(core.recovered))
        if death.write is not None:
            _die_at(*death.write)
        if death.is_ready_first:
            signal.setitimer(signal.ITIMER_PROF, death.seconds)
        for number in range(1000 if death.seconds else 1):
            chosen = random.Random(seed + number)
            order = chosen.sample(range(len(expected)), len(expected))
            ids = [[token for token, _ in answer] for answer in expected]
            emitted = {index: ids[index][: chosen.choice([0, chosen.randrange(MAX_TOKENS)])] for index in order}
            generate(core, emitted, lambda index, answer: tell(index=index, answer=answer))
            empty, idle = len(pool._empty) + len(pool._emptied), len(pool._idle)
            tell(leaked=pool.total - empty - idle, used=pool.used)


class _Cut(Exception):
    """Never raised: the process dies first."""


def _die_at(write: int, cut: float) -> None:
    """Dies in this process' write of that number, after that part of it."""
    whole, count = KeptCache._write, 0

    def partial(self: KeptCache, block: int, seal: bytes) -> None:
        nonlocal count
        count += 1
        if count <= write:
            whole(self, block, seal)
            return
        size = int(len(seal) * cut)
        start = block * len(seal)
        self._seals[start : start + size] = seal[:size]
        os.kill(os.getpid(), signal.SIGKILL)
        raise _Cut

    KeptCache._write = partial  # type: ignore[method-assign]


def _break() -> None:
    KeptCache.erased = lambda self, block: None  # type: ignore[method-assign]
    KeptCache._is_whole = lambda self, block, seal, digest: True  # type: ignore[method-assign]


@dataclass(slots=True)
class Death:
    """The time of an engine's death: after some seconds on the processor, or at a write."""

    seconds: float = 0.0
    is_ready_first: bool = False  # the seconds are counted from then on: a slow start may take all of them
    write: tuple[int, float] | None = None


def _run_one(
    folder: str, kept: KeptDescriptors, death: Death, seed: int, expected: Sequence[Answered], *, broken: bool
) -> tuple[list[str], bool]:
    """The lines of an engine, and whether it was killed."""
    own, end = pair()
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        own.close()
        os.close(read)
        if broken:
            _break()
        # Its default is to end the process at once, as SIGKILL does.
        signal.setitimer(signal.ITIMER_PROF, 0.0 if death.is_ready_first else death.seconds)
        try:
            _live(folder, KeeperClient(end), write, seed, death, expected)
        except BaseException as error:
            os.write(write, json.dumps({"failed": repr(error)}).encode() + b"\n")
            os._exit(1)
        os._exit(0)
    end.close()
    os.close(write)
    lines = serve(pid, Conversation(own, kept, Answer(), pid), read)
    return lines, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) in (-signal.SIGKILL, -signal.SIGPROF)


def serve(pid: int, conversation: Conversation, read: int) -> list[str]:
    pidfd, text = os.pidfd_open(pid), b""
    open_sources = {read}
    while True:
        sources = [*open_sources, *conversation.sources, pidfd]
        ready = select.select(sources, [], [], _SECONDS)[0]
        assert ready, "the engine makes no progress"
        if read in ready:
            piece = os.read(read, 1 << 16)
            text += piece
            if not piece:
                open_sources.discard(read)
        elif pidfd in ready:
            break
        elif ready:
            conversation.serve()
    conversation.close()
    os.close(pidfd)
    os.close(read)
    return text.decode().splitlines()


def _judge(report: Report, lines: Sequence[str], expected: Sequence[Answered]) -> None:
    for line in lines:
        if not line.endswith("}"):
            continue  # cut by the death
        said = json.loads(line)
        report.recovered += said.get("recovered", 0)
        if "answer" in said:
            report.answers += 1
            report.wrong += not _is_right(said["answer"], expected[said["index"]])
        if said.get("leaked") or said.get("used") or "failed" in said:
            report.problems.append(line)


def _schedule(kills: int, seed: int, *, at_writes: bool) -> list[Death]:
    if not at_writes:
        chosen = random.Random(seed)
        return [Death(chosen.uniform(0.01, 0.5), is_ready_first=bool(number % 2)) for number in range(kills)]
    cuts = [0.0, 0.13, 0.5, 1.0]
    at = [Death(write=(seed + number // len(cuts), cuts[number % len(cuts)])) for number in range(kills)]
    return [each for death in at for each in (death, Death())]


def main() -> None:
    """Kills engines, and prints what was found."""
    folder, kills, *options = sys.argv[1:]
    torch.set_num_threads(1)
    kept_cache._log.warning = lambda *_, **__: None
    expected: list[Answered] = [[] for _ in prompts()]
    with torch.inference_mode():
        core = EngineCore(config(folder))
        generate(core, dict.fromkeys(range(len(expected)), ()), expected.__setitem__)
    report, kept = Report(), KeptDescriptors()
    [seed, *_] = [int(each.removeprefix("--seed=")) for each in options if each.startswith("--seed=")] or [0]
    for number, death in enumerate(_schedule(int(kills), seed, at_writes="--at-writes" in options)):
        lines, was_killed = _run_one(
            folder, kept, death, number + seed * 10_000, expected, broken="--broken" in options
        )
        report.kills += was_killed
        report.ended += not was_killed
        _judge(report, lines, expected)
    print(json.dumps(asdict(report)))


if __name__ == "__main__":
    assert Path(sys.argv[1]).is_dir()
    main()
