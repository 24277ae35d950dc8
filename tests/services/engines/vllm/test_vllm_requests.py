"""Requests that vLLM does not answer; without vLLM."""

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from baton.errors import EngineFailed
from services.engines.external.requests import RequestLimits
from services.engines.vllm.requests.generation import VllmRequest
from services.engines.vllm.requests.inflight import VllmRequests
from services.engines.vllm.requests.sampling import Plan


class EngineGenerateError(Exception):
    """vLLM's has no message either."""


class Overflow(Exception):
    """Stands for a class of vLLM's that nothing raises here."""


async def _fails(**_: Any) -> AsyncGenerator[Any, None]:
    yield SimpleNamespace(
        outputs=[SimpleNamespace(token_ids=[4], logprobs=None, finish_reason=None)],
        prompt_logprobs=None,
        kv_transfer_params=None,
        num_cached_tokens=0,
        metrics=None,
    )
    try:
        raise ModuleNotFoundError("No module named 'lmformatenforcer'")
    except ModuleNotFoundError as error:
        raise EngineGenerateError from error


async def test_an_error_without_a_message_names_its_cause() -> None:
    package: Any = SimpleNamespace(
        version="0.30.0",
        generate_arguments=frozenset(),
        overflow_error=Overflow,
        client_error=Overflow,
        dead_error=Overflow,
    )
    requests = VllmRequests(SimpleNamespace(generate=_fails), package, RequestLimits(4, 32, 60.0, 1.0))
    generation = requests.submit(VllmRequest(Plan((1, 2), ()), {}))
    with pytest.raises(EngineFailed) as caught:
        await generation.ending()
    assert caught.value.message == (
        "vLLM failed: EngineGenerateError, from ModuleNotFoundError: No module named 'lmformatenforcer'"
    )
    assert requests.failure is None
    assert len(requests) == 0
