"""KV that arrives late, in blocks that were given to another request: by SGLang alone, and behind Baton.

A client leaves while the first part of its prompt is on its way over a slow link. The next request needs its blocks.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.engines import sglang, slow_sends
from support.engines.checkpoints import save_qwen3
from support.engines.engine_calls import collect, greedy
from support.eventually import eventually

from baton.errors import Overloaded
from runtime.aio import timeout
from services.engines.context import EngineContext
from services.engines.external.surroundings import free_ports
from services.engines.kv_transfer import RemoteKv
from services.engines.prompt import Prompt
from services.engines.sglang import loading
from services.engines.sglang.config import SglangConfig
from services.engines.sglang.engine import SglangEngine
from services.engines.sglang.factory import open_sglang, resolve
from services.engines.sglang.package import open_sglang_package

pytestmark = [pytest.mark.requires_sglang, pytest.mark.timeout(600)]

MOST = 120
LEFT = tuple((11 * index * index + 5 * index) % 300 + 10 for index in range(400))
NEXT = tuple((7 * index * index + 3 * index) % 300 + 10 for index in range(400))
LEAVES_AFTER_SECONDS = 0.3
# In the first one Triton compiles.
_ASK_SECONDS = 140.0
Answer = list[tuple[int, float]]
Ask = Callable[[], Awaitable[Answer]]


def _config(tmp_path: Path, port: int, role: str) -> SglangConfig:
    """The decode side has room for one prompt and its answer."""
    pool = 4096 if role == "prefill" else sglang.POOL_TOKENS
    checkpoint = tmp_path / "model"
    if not checkpoint.exists():
        checkpoint.mkdir()
        save_qwen3(checkpoint, sglang.HEAD_DIM)
    args = {"max_total_tokens": pool, "context_length": 640}
    made = {**sglang.settings(checkpoint, port, args), "kv_events": False}
    return SglangConfig.model_validate(made)


def _told(name: str, right: Answer, found: Answer) -> float:
    """Prints how an answer differs from the right one; returns by how much its log probabilities do at most."""
    ids = sum(one[0] != other[0] for one, other in zip(right, found, strict=True))
    numbers = [abs(one[1] - other[1]) for one, other in zip(right, found, strict=True)]
    differing = sum(each > 0 for each in numbers)
    first = next((index for index, each in enumerate(numbers) if each > 0), None)
    print(
        f"{name}: {ids} of {len(right)} tokens and {differing} log probabilities differ, "
        f"by up to {max(numbers):.4f}, from token {first} on",
        flush=True,
    )
    return max(numbers)


@contextmanager
def _slow_link(slow: Path) -> Iterator[None]:
    slow.touch()
    yield
    slow.unlink()


async def _differing(name: str, slow: Path, leave: Callable[[], Awaitable[None]], ask: Ask) -> float:
    """By how much the answer behind a client that leaves differs from the right one."""
    # From then on the prefill side has the prompt in its cache.
    await ask()
    right = await ask()
    assert _told(f"{name}, undisturbed", right, await ask()) == 0.0
    with _slow_link(slow):
        await leave()
    return _told(f"{name}, behind a client that left", right, await ask())


@dataclass(frozen=True, slots=True)
class Alone:
    """Both sides of SGLang, without Baton's changes."""

    prefill: Any
    decode: Any
    package: Any
    port: int

    def generate(self, engine: Any, ids: tuple[int, ...], room: int, name: str) -> AsyncIterator[dict[str, Any]]:
        asked = self.package.generate_request(
            rid=name,
            input_ids=list(ids),
            stream=True,
            return_logprob=True,
            sampling_params={"max_new_tokens": MOST, "temperature": 0.0, "ignore_eos": True},
            bootstrap_host="127.0.0.1",
            bootstrap_port=self.port,
            bootstrap_room=room,
        )
        found: AsyncIterator[dict[str, Any]] = engine.tokenizer_manager.generate_request(asked, None)
        return found

    async def _answer(self, engine: Any, ids: tuple[int, ...], room: int, name: str) -> Answer:
        told = [each async for each in self.generate(engine, ids, room, name)][-1]
        return [(int(token), float(value)) for value, token, _ in told["meta_info"]["output_token_logprobs"]]

    async def ask(self, rooms: list[int]) -> Answer:
        rooms.append(rooms[-1] + 4)
        room = rooms[-1]
        sides = ((self.prefill, "p"), (self.decode, "d"))
        asked = (self._answer(engine, NEXT, room, f"{side}{room:08d}") for engine, side in sides)
        async with timeout(_ASK_SECONDS):
            _, answer = await asyncio.gather(*asked)
        return answer

    async def leave(self) -> None:
        """A request whose decode side is aborted: the prefill side is told by SGLang itself."""
        sides = ((self.prefill, "p"), (self.decode, "d"))
        tasks = [asyncio.create_task(self._answer(engine, LEFT, 1, f"{side}-leaves")) for engine, side in sides]
        await asyncio.sleep(LEAVES_AFTER_SECONDS)
        self.decode.tokenizer_manager.abort_request("d-leaves")
        async with timeout(_ASK_SECONDS):
            print(await asyncio.gather(tasks[1], return_exceptions=True), flush=True)
        tasks[0].cancel()


@asynccontextmanager
async def _alone(tmp_path: Path) -> AsyncIterator[Alone]:
    port, package = free_ports("127.0.0.1", 1), open_sglang_package()
    async with AsyncExitStack() as stack:

        async def opened(role: str) -> Any:
            config = _config(tmp_path, port, role)
            starting = loading.SglangStart((role,), 640, None)
            started = await asyncio.to_thread(loading.start, config, resolve(config), package, starting)
            stack.push_async_callback(loading.end, started)
            manager = started.llm.tokenizer_manager
            manager.event_loop = asyncio.get_running_loop()
            task = asyncio.create_task(manager.handle_loop())
            stack.callback(task.cancel)
            return started.llm

        _config(tmp_path, port, "prefill")
        prefill, decode = await asyncio.gather(opened("prefill"), opened("decode"))
        yield Alone(prefill, decode, package, port)


async def test_alone_it_reads_kv_of_another_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sglang.installed():
        monkeypatch.setenv(slow_sends.FILE, str(slow := tmp_path / "slow"))
        monkeypatch.setattr(loading, "run_scheduler", slow_sends.run_alone)
        async with _alone(tmp_path) as alone:
            rooms = [2]
            assert await _differing("SGLang alone", slow, alone.leave, lambda: alone.ask(rooms)) > 0


@dataclass(frozen=True, slots=True)
class Behind:
    """Both sides behind Baton's adapter, used as its workers do."""

    prefill: SglangEngine
    decode: SglangEngine

    async def ask(self) -> Answer:
        prompt, sampling = Prompt(NEXT), replace(greedy(MOST), logprobs=0)
        async with timeout(_ASK_SECONDS):
            while True:
                try:
                    room = await self.decode.allocate(prompt, sampling, "127.0.0.1:1")
                    break
                except Overloaded:
                    await asyncio.sleep(0.01)
            sent = await self.prefill.prefill_into(prompt, sampling, room.engine_state)
        source = RemoteKv(replace(prompt, emitted=(sent.first_token,)), prompt.num_tokens, room.engine_state, room)
        rest = await collect(await self.decode.decode_remote(source, sampling))
        assert sent.logprob is not None
        reports = [sent.logprob, *rest.logprobs]
        return [(each.token_id, each.logprob) for each in reports]

    async def leave(self) -> None:
        """A client that leaves: its worker cancels the prefill and closes the room."""
        room = await self.decode.allocate(Prompt(LEFT), greedy(MOST), "127.0.0.1:1")
        computing = asyncio.create_task(self.prefill.prefill_into(Prompt(LEFT), greedy(MOST), room.engine_state))
        await asyncio.sleep(LEAVES_AFTER_SECONDS)
        await room.release()
        computing.cancel()
        await asyncio.wait([computing])


async def test_behind_baton_it_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sglang.installed():
        monkeypatch.setenv(slow_sends.FILE, str(slow := tmp_path / "slow"))
        monkeypatch.setattr(loading, "run_scheduler", slow_sends.run_behind_baton)
        port = free_ports("127.0.0.1", 1)
        async with AsyncExitStack() as stack:
            configs = [(role, _config(tmp_path, port, role)) for role in ("prefill", "decode")]
            opening = [open_sglang(config, EngineContext(roles=(role,))) for role, config in configs]
            prefill, decode = await asyncio.gather(*(each.__aenter__() for each in opening))
            for each in opening:
                stack.push_async_exit(each)
            assert isinstance(prefill, SglangEngine)
            assert isinstance(decode, SglangEngine)
            behind = Behind(prefill, decode)
            assert await _differing("behind Baton", slow, behind.leave, behind.ask) == 0
            await eventually(lambda: prefill.load().blocks_used == decode.load().blocks_used == 0)
