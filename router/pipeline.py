"""The life of a request, top to bottom: validate, tokenize, admit, encode, execute.

Read this first and execution.py next: there a request is placed, prefilled, handed over and decoded.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from baton.engine.v1 import prompt_pb2
from baton.inference.v1 import generate_pb2, lora_pb2, timing_pb2
from baton_http2.server.reply import Reply
from media.content import MediaItem
from router import validation
from router.admission.controller import Admission, AdmissionController
from router.admission.predictor import RequestEstimate
from router.answers import SeveralAnswers, draw_seed, keep_together
from router.config import LimitsConfig
from router.context import RequestContext, RunningRequests
from router.decoding.state import Executor
from router.execution import execute
from router.multimodal.encode import LoadedMedia
from router.multimodal.prompt import MultimodalProcessor, MultimodalPrompt
from router.resume.execution import completion_of, resume
from router.sessions import prompt_cache, retained_tokens
from router.stream.general import Pace
from router.stream.writer import StreamWriter
from router.telemetry.spans import set_request_attributes
from router.telemetry.timings import end_reply
from router.text import request_input
from router.text.chat_template import LONGEST_SECONDS, LOOP_SECONDS, SlowTemplate
from router.text.completion import Completion
from router.text.grammar_check import GrammarCheck
from router.text.media_validation import media_items
from router.text.served_model import ServedModel
from router.workers.cluster import Cluster
from router.workers.serialized_prompt import SerializedPrompt
from runtime.threads import MANY_IDS

Result = TypeVar("Result")


class Pipeline:
    """Runs requests on a cluster."""

    def __init__(
        self,
        running: RunningRequests,
        cluster: Cluster,
        admission: AdmissionController,
        processor: MultimodalProcessor,
        executor: Executor,
        limits: LimitsConfig,
        grammars: GrammarCheck,
    ) -> None:
        self.running = running
        self.cluster = cluster
        self.admission = admission
        self.processor = processor
        self.executor = executor
        self.limits = limits
        self._grammars = grammars
        self._checks = validation.OptionChecks(limits)

    def run(self, ctx: RequestContext, reply: Reply) -> Coroutine[Any, Any, None]:
        """Answers a request: Started, tokens, Finished. Raises a BatonError if it fails.

        A cancellation of the caller means that the client has left.
        """
        # Not a coroutine of its own, which every step of the request would pass.
        describe, ended = partial(set_request_attributes, ctx.request), partial(end_reply, reply, ctx.stats.timings)
        answer = self._answer if self.admission.quotas.is_unlimited else self._answer_within_quota
        return self.running.run(ctx, "baton.generate", describe, partial(answer, ctx, reply), ended)

    async def _answer_within_quota(self, ctx: RequestContext, reply: Reply) -> None:
        async with self.admission.track_tenant(ctx):
            await self._answer(ctx, reply)

    async def _answer(self, ctx: RequestContext, reply: Reply) -> None:
        """Validates, tokenizes, admits, encodes and executes."""
        model = await self._validate(ctx)
        prompt = await self._tokenize(ctx, model)
        async with self.admission.admit(ctx, _estimate(ctx, model)) as admission:
            with prompt:
                await prompt.embed()
                await self._execute(ctx, model, prompt, reply, admission)

    async def _validate(self, ctx: RequestContext) -> ServedModel:
        """The model that the request is for. Raises InvalidRequest or Unsupported before any worker is called."""
        with ctx.stats.timings.measure(timing_pb2.STAGE_ADMISSION):
            await ctx.inject("admission")
            model = self.cluster.model(ctx.request.model)
            ctx.stats.model = model.name
            if ctx.is_large:
                await asyncio.to_thread(self._checks.check, ctx.request, model)
            else:
                self._checks.check(ctx.request, model)
            await self._grammars.prepare(ctx.request, model)
        return model

    async def _tokenize(self, ctx: RequestContext, model: ServedModel) -> MultimodalPrompt:
        """The prompt with its media loaded, but not encoded. Raises InvalidRequest for an unknown adapter."""
        lora = self.cluster.lora(ctx.request, model)
        with ctx.stats.timings.measure(timing_pb2.STAGE_TOKENIZE):
            await ctx.inject("tokenize")
            read = await _in_time(ctx, partial(_read_input, ctx.request, model, lora))
            if ctx.request.routing.session_key or ctx.request.HasField("cache"):
                read.prompt.cache.CopyFrom(await self._prompt_cache(ctx, read.token_ids, model))
        ctx.stats.prompt_tokens = read.expected_tokens
        media = await self._load_media(ctx, read.media) if read.media else ()
        serialized = None
        if len(read.token_ids) > MANY_IDS:
            serialized = await asyncio.to_thread(SerializedPrompt.of, read.token_ids, read.prompt)
        prompt = self.processor.prompt(ctx, model, read.prompt, media)
        prompt.token_ids, prompt.bad_sequences = read.token_ids, read.bad_sequences
        prompt.serialized = serialized
        return prompt

    async def _prompt_cache(
        self, ctx: RequestContext, token_ids: Sequence[int], model: ServedModel
    ) -> prompt_pb2.PromptCache:
        request, retained = ctx.request, 0
        if request.HasField("cache"):
            retained = await _in_time(ctx, partial(retained_tokens, request, token_ids, model))
        return prompt_cache(request, ctx.qos.tenant, retained, self.limits.max_retain_seconds)

    async def _load_media(self, ctx: RequestContext, items: Sequence[MediaItem]) -> Sequence[LoadedMedia]:
        with ctx.stats.timings.measure(timing_pb2.STAGE_ADMISSION):
            return await self.processor.load(items)

    async def _execute(
        self, ctx: RequestContext, model: ServedModel, prompt: MultimodalPrompt, reply: Reply, admission: Admission
    ) -> None:
        """Runs the request on workers. Encoding has given the prompt its full length, which bounds the answer."""
        ctx.stats.prompt_tokens = prompt.num_tokens
        if ctx.request.sampling.n > 1:
            keep_together(ctx.request)
            if ctx.keep is not None or ctx.notes is not None:
                draw_seed(ctx.request, model)
            answers = SeveralAnswers(self.executor, self.admission, self.limits, ctx, model, _estimate(ctx, model))
            await answers.run(prompt, reply, admission)
            return
        sampling = validation.resolve_sampling(ctx.request, prompt, model)
        if ctx.keep is not None and ctx.keep.is_resumed:
            replayed = completion_of(ctx, sampling, model, prompt)
            async with self.writer(ctx, reply) as stream:
                await resume(self.executor, ctx, prompt, replayed, stream)
            return
        completion = Completion(ctx.request, sampling, model, prompt.answer_parser(model))
        async with self.writer(ctx, reply) as stream:
            await execute(self.executor, ctx, prompt, completion, stream)

    def writer(self, ctx: RequestContext, reply: Reply) -> StreamWriter:
        """Writes the messages of a request to its client."""
        limits = self.limits
        return StreamWriter(
            ctx.request_id,
            reply,
            limits.max_waiting_tokens,
            limits.slow_reader_seconds,
            ctx.stats.timings.first_token_sent,
            pace=Pace.of(ctx.request.response),
        )


def _estimate(ctx: RequestContext, model: ServedModel) -> RequestEstimate:
    stopping = ctx.request.stopping
    max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else None
    return RequestEstimate(model.name, ctx.stats.prompt_tokens, max_tokens)


async def _in_time(ctx: RequestContext, work: Callable[[float], Result]) -> Result:
    """Calls `work` with the time that a chat template may take. Of a large input, or if it is slow, in a thread."""
    if not ctx.is_large:
        try:
            return work(LOOP_SECONDS)
        except SlowTemplate:
            pass  # once more, beside the loop
    return await asyncio.to_thread(work, LONGEST_SECONDS)


@dataclass(slots=True)
class _Input:
    """The input of a request as workers get it, and its media, which are not loaded yet."""

    token_ids: Sequence[int]
    prompt: prompt_pb2.Prompt
    expected_tokens: int
    media: Sequence[MediaItem]
    bad_sequences: Sequence[Sequence[int]]


def _read_input(
    request: generate_pb2.GenerateRequest, model: ServedModel, lora: lora_pb2.LoraAdapter | None, seconds: float
) -> _Input:
    """Tokenizes a validated request, whose chat template may take so many seconds."""
    token_ids = request_input.tokenize(request, model, seconds)
    return _Input(
        token_ids,
        _prompt(token_ids, request.routing.cache_salt, lora),
        request_input.expected_tokens(request, token_ids, model),
        media_items(request),
        request_input.bad_sequences(request, model) if request.sampling.bad_words else (),
    )


def _prompt(token_ids: Sequence[int], cache_salt: str, lora: lora_pb2.LoraAdapter | None) -> prompt_pb2.Prompt:
    """The prompt; of many ids without them, which SerializedPrompt has."""
    return prompt_pb2.Prompt(
        token_ids=token_ids if len(token_ids) <= MANY_IDS else (), cache_salt=cache_salt, lora=lora
    )
