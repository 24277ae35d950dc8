"""Kills a worker: how long until it answers again, with a keeper and without? And what keeping costs a token.

    PYTHONPATH=.:tests .venv/bin/python benchmarks/kept_memory.py [--model models/demo] [--kills 5]
    PYTHONPATH=.:tests .venv/bin/python benchmarks/kept_memory.py --token [--model models/demo]

The first counts from the kill to the first token of a call that is repeated until it succeeds. Without a keeper the
process is started again at once. Beside the seconds there is the processor's time of the process that started, which
does not depend on what else the machine does. `--token` compares the processor's time of tokens, in turns. What becomes
of streams is counted by killed_workers.py.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch
from support.clients.worker_calls import calls_to, decode_request
from support.cluster.processes import Process, process
from support.keeping import keeper_here, workers_of

from baton.errors import BatonError
from services.engines.context import KeptMemory
from services.engines.journal.slots import Slot
from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.sequence import Event

_SEQUENCES, _TOKENS, _ROUNDS = 16, 160, 6


def _overrides(model: str, execution: str, *, kept: bool) -> list[str]:
    engine = f"engine={{kind: pytorch, model: {model}, execution: {execution}, device: cpu, threads: 1}}"
    keeping = ["keep_memory={weights: true, kv: true}"] if kept else []
    return [engine, "registry.kind=memory", "drain_seconds=0", *keeping]


async def _first_token(address: str) -> None:
    while True:
        try:
            async with calls_to(address) as calls:
                await calls.decode(decode_request(max_tokens=1))
                return
        except (BatonError, OSError, AssertionError):
            await asyncio.sleep(0.01)


def _worker(started: Process, *, kept: bool) -> psutil.Process:
    return workers_of(started.popen.pid)[0] if kept else psutil.Process(started.popen.pid)


async def _restart(model: str, execution: str, kills: int, *, kept: bool) -> None:
    seconds, processor = [], []
    overrides = _overrides(model, execution, kept=kept)
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        for _ in range(1 if kept else kills):
            with process("services", "worker.yaml", overrides, log) as started:
                began = time.perf_counter()
                await _first_token(started.address)
                for _ in range(kills if kept else 0):
                    _worker(started, kept=True).kill()
                    began = time.perf_counter()
                    await _first_token(started.address)
                    seconds.append(time.perf_counter() - began)
                    processor.append(sum(_worker(started, kept=True).cpu_times()[:2]))
                if not kept:
                    seconds.append(time.perf_counter() - began)
                    processor.append(sum(_worker(started, kept=False).cpu_times()[:2]))
    how = "kept" if kept else "not kept"
    print(
        f"{execution:8} {how:9} {_median(seconds)} s to the first token, {_median(processor)} s of the processor",
        flush=True,
    )


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _core(model: str, kept: KeptMemory | None) -> EngineCore:
    values = {"model": model, "device": "cpu", "execution": "library", "threads": 1, "kv_cache_bytes": 64 << 20}
    return EngineCore(PyTorchConfig.model_validate(values), kept=kept)


def _token_seconds(core: EngineCore, salt: int) -> float:
    """The processor's seconds of a token."""
    events: list[Event] = []
    slots: list[Slot | None] = []
    sampling = Sampling(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True)
    for number in range(_SEQUENCES):
        prompt = Prompt(tuple(range(5, 69)), cache_salt=f"{salt} {number}")
        sequence = core.new_sequence(prompt, sampling, events.append, hold=False)
        if core.journal is not None:
            sequence.slot = core.journal.open_slot(b"x" * 2000, prompt.token_ids)
            slots.append(sequence.slot)
        core.submit(sequence)
    began = time.process_time()
    while core.steps.step():
        pass
    seconds = (time.process_time() - began) / (_SEQUENCES * _TOKENS)
    for slot in slots:
        assert slot is not None
        assert core.journal is not None
        core.journal.free_slot(slot)
    return seconds


def _cost(model: str) -> None:
    torch.set_num_threads(1)
    with keeper_here() as keeper, keeper.memory(weights=True, kv=True) as kept, torch.inference_mode():
        plain, keeping = _core(model, None), _core(model, kept)
        pairs = [(_token_seconds(plain, number), _token_seconds(keeping, number)) for number in range(_ROUNDS)]
        plain.close()
        keeping.close()
    without, with_it = (statistics.median(each) for each in zip(*pairs[1:], strict=True))
    ratio = statistics.median(kept / plain for plain, kept in pairs[1:])
    print(f"a token: {without * 1e6:.1f} us without, {with_it * 1e6:.1f} us with kept memory ({ratio - 1:+.1%})")


def main() -> None:
    """Measures one of the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/demo")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--token", action="store_true")
    options = parser.parse_args()
    if options.token:
        _cost(options.model)
        return
    for execution in ("library", "fused"):
        for kept in (False, True):
            asyncio.run(_restart(options.model, execution, options.kills, kept=kept))


if __name__ == "__main__":
    main()
