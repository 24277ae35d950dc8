"""Tokenize and Detokenize: a model's tokenizer for clients."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from typing_extensions import Self

from baton.errors import Overloaded
from baton.inference.v1 import tokenize_pb2
from router.admission.quotas import Quotas
from router.config import LimitsConfig
from router.telemetry import metrics
from router.telemetry.stats import RequestStats
from router.text import chat_input, request_input
from router.text.served_model import ServedModel
from router.workers.cluster import Cluster
from rpc.violations import Violations

Request = TypeVar("Request", tokenize_pb2.TokenizeRequest, tokenize_pb2.DetokenizeRequest)
Response = TypeVar("Response")

_RETRY_SECONDS = 1.0


class Tokenization:
    """Converts text to ids and back in a thread of its own, so that it never delays Generate.

    A call counts as a request of its tenant. An async context manager, which ends the thread.
    """

    def __init__(self, cluster: Cluster, quotas: Quotas, limits: LimitsConfig) -> None:
        self._cluster = cluster
        self._quotas = quotas
        self._limits = limits
        self._waiting = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenization")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def tokenize(self, request: tokenize_pb2.TokenizeRequest, tenant: str) -> tokenize_pb2.TokenizeResponse:
        """The ids of a prompt or a conversation. Raises InvalidRequest, Unsupported, QuotaExceeded, Overloaded."""
        return await self._run(partial(_tokenize, self._limits), request, tenant)

    async def detokenize(self, request: tokenize_pb2.DetokenizeRequest, tenant: str) -> tokenize_pb2.DetokenizeResponse:
        """The text of ids. Raises InvalidRequest, Unsupported, QuotaExceeded, Overloaded."""
        return await self._run(_detokenize, request, tenant)

    async def _run(self, work: Callable[[Request, ServedModel], Response], request: Request, tenant: str) -> Response:
        model = self._cluster.model(request.model)
        async with self._quotas.track(tenant, RequestStats(request_id="")):
            if self._waiting >= self._limits.max_tokenizing:
                metrics.REFUSALS.labels(Overloaded.reason).inc()
                text = f"{self._waiting} calls of Tokenize and Detokenize are waiting already"
                raise Overloaded(text, retry_after_seconds=_RETRY_SECONDS)
            self._waiting += 1
            try:
                return await asyncio.get_running_loop().run_in_executor(self._thread, work, request, model)
            finally:
                self._waiting -= 1


def _tokenize(
    limits: LimitsConfig, request: tokenize_pb2.TokenizeRequest, model: ServedModel
) -> tokenize_pb2.TokenizeResponse:
    violations = Violations()
    if request.WhichOneof("input") == "chat":
        chat_input.bound(request.chat, limits, violations)
        violations.raise_any()
        chat_input.check(request.chat, model, violations)
        violations.raise_any()
        chat_input.require(request.chat, model)
        ids, text = chat_input.encode(request.chat, model)
        return tokenize_pb2.TokenizeResponse(token_ids=ids, text=text)
    request_input.check_prompt(request.prompt, model, violations)
    violations.raise_any()
    ids = model.text_tokenizer.encode(request.prompt)
    return tokenize_pb2.TokenizeResponse(token_ids=ids, text=request.prompt)


def _detokenize(request: tokenize_pb2.DetokenizeRequest, model: ServedModel) -> tokenize_pb2.DetokenizeResponse:
    violations = Violations()
    request_input.bound_ids("token_ids", request.token_ids, model, violations)
    violations.raise_any()
    violations.token_ids("token_ids", request.token_ids, model.limits.vocab_size)
    violations.raise_any()
    text = model.text_tokenizer.decode(request.token_ids[:], request.keep_special_tokens)
    return tokenize_pb2.DetokenizeResponse(text=text)
