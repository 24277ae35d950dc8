"""KV that vLLM holds, where its processes have ended or do not answer; without vLLM."""

from collections.abc import Sequence
from typing import Any

import pytest

from services.engines.external.held_kv import ExternalPrefill
from services.engines.vllm.held_kv import HeldByVllm, VllmHeldKv


class EngineDeadError(Exception):
    """An error like vLLM's: an Exception, and of no narrower class."""


class Workers:
    """Every call of vLLM's workers ends like this."""

    def __init__(self, answer: Sequence[bool] | Exception) -> None:
        self._answer = answer

    async def collective_rpc(self, method: str, *, timeout: float | None, args: tuple[Any, ...]) -> Sequence[bool]:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def _kv(answer: Sequence[bool] | Exception, until: float) -> VllmHeldKv:
    prefilled = ExternalPrefill(
        first_token=1,
        logprob=None,
        finish_reason=None,
        num_tokens=40,
        cached_tokens=0,
        compute_seconds=0.0,
        engine_state=b"state",
    )
    return VllmHeldKv(prefilled, "r", HeldByVllm(Workers(answer), 60.0, 32), until)


@pytest.mark.parametrize("answer", [EngineDeadError("core"), RuntimeError("worker"), TimeoutError(), [True, False], []])
async def test_a_release_succeeds_whatever_vllm_answers(answer: Sequence[bool] | Exception) -> None:
    assert await _kv(answer, until=0.0).release() == 2


@pytest.mark.parametrize("answer", [EngineDeadError("core"), [True, False], []])
async def test_kv_beyond_its_lease_counts_as_lost_unless_every_worker_has_it(
    answer: Sequence[bool] | Exception,
) -> None:
    assert not await _kv(answer, until=0.0).was_held()


async def test_kv_beyond_its_lease_that_every_worker_has_was_held() -> None:
    assert await _kv([True, True], until=0.0).was_held()
