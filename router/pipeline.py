"""The life of a request, top to bottom: admitted, tokenized, encoded, and then the race of its workers to the end.

Read this first, and race.py next: there a request is placed, prefilled, handed over and decoded.
"""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from baton.engine.v1 import prompt_pb2
from baton.inference.v1 import generate_pb2, timing_pb2

from router import admission, media_admission, traces
from router.account import Account
from router.answer import Answer
from router.cluster import Cluster
from router.config import LimitsConfig
from router.deadline import Deadline
from router.embedder import LoadedMedia
from router.fault_plan import strike
from router.forecast import Candidate
from router.gate import Gate
from router.hops import Hops
from router.illustrated_prompt import IllustratedPrompt
from router.illustrator import Illustrator
from router.ledger import Ledger
from router.model import ServedModel
from router.observation import observe
from router.outbox import Outbox, Send
from router.race import Entrant, Race, Track
from router.reply import Reply
from router.requests import RequestTable, RunningRequest
from rpc.errors import Cancelled
from rpc.tracing.span import stage_span

_LONG_INPUT_BYTES = 4096  # from here on tokenizing would hold up the other streams


class Pipeline:
    """Runs requests on a cluster."""

    def __init__(
        self, cluster: Cluster, gate: Gate, illustrator: Illustrator, track: Track, limits: LimitsConfig
    ) -> None:
        self._cluster = cluster
        self._illustrator = illustrator
        self._gate = gate
        self._track = track
        self._limits = limits
        self.requests = RequestTable()

    async def generate(self, request: generate_pb2.GenerateRequest, reply: Reply) -> None:
        """Answers a request: Started, tokens, Finished. Raises a BatonError where it cannot.

        Cancelling the caller means that the client has left.
        """
        with (
            stage_span("baton.generate") as span,
            self.requests.enter(request.request_id) as running,
            observe(running.request_id, self._track.meter) as account,
            reply.ending_with(account.ledger),
        ):
            traces.ask(request, span)
            # A task of its own, so that CancelGeneration can stop it and the call still answers why.
            running.task = asyncio.create_task(self._run(request, reply, running, account))
            try:
                await running.task
            except (asyncio.CancelledError, Cancelled):
                if running.cancelled_because:
                    raise Cancelled(running.cancelled_because) from None
                traces.left(account, reply.client_seconds, span)
                raise

    async def _run(
        self,
        request: generate_pb2.GenerateRequest,
        reply: Reply,
        running: RunningRequest,
        account: Account,
    ) -> None:
        ledger, client_seconds = account.ledger, reply.client_seconds
        seconds = self._limits.request_timeout_seconds if client_seconds is None else client_seconds
        deadline = Deadline(seconds, ledger, is_callers=client_seconds is not None)
        async with deadline.enforced():
            with ExitStack() as serving:
                admitted = await self._admit(request, running, account, deadline, serving)
                async with self._gate.inside(_candidate(request, account), deadline, account):
                    with admitted.prompt as prompt:
                        await prompt.embed(account)
                        entrant = _enter(request, admitted, account)
                        async with self._outbox(running, reply.send, ledger) as outbox:
                            hops = Hops(running, ledger, deadline, request.routing.session_key)
                            await Race(entrant, self._track, hops, outbox).run()

    def _outbox(self, running: RunningRequest, send: Send, ledger: Ledger) -> Outbox:
        limits = self._limits
        return Outbox(
            running.request_id, send, limits.max_waiting_tokens, limits.slow_reader_seconds, ledger.first_token_sent
        )

    async def _admit(
        self,
        request: generate_pb2.GenerateRequest,
        running: RunningRequest,
        account: Account,
        deadline: Deadline,
        serving: ExitStack,
    ) -> "_Admitted":
        """Checks, tokenizes, and loads the media; no worker is called before all that."""
        with account.ledger.measure(timing_pb2.STAGE_ADMISSION):
            serving.enter_context(self._gate.serving(account))
            await strike("admission", account.request_id)
            model = self._cluster.model(request.model)
            account.model = model.name
            admission.check(request, model, self._limits)
        token_ids = await _tokenize(request, model, account)
        media = await self._load_media(request, account)
        prompt = prompt_pb2.Prompt(token_ids=token_ids, cache_salt=request.routing.cache_salt)
        return _Admitted(model, self._illustrator.prompt(prompt, media, model, running, deadline))

    async def _load_media(self, request: generate_pb2.GenerateRequest, account: Account) -> Sequence[LoadedMedia]:
        items = media_admission.media_items(request)
        if not items:
            return ()
        with account.ledger.measure(timing_pb2.STAGE_ADMISSION):
            return await self._illustrator.load(items)


@dataclass(frozen=True, slots=True)
class _Admitted:
    """A request that nothing is wrong with, as far as can be known before its media are encoded."""

    model: ServedModel
    prompt: IllustratedPrompt


async def _tokenize(request: generate_pb2.GenerateRequest, model: ServedModel, account: Account) -> tuple[int, ...]:
    with account.ledger.measure(timing_pb2.STAGE_TOKENIZE):
        await strike("tokenize", account.request_id)
        if request.ByteSize() > _LONG_INPUT_BYTES and not request.HasField("token_ids"):
            token_ids = await asyncio.to_thread(admission.tokenize, request, model)
        else:
            token_ids = admission.tokenize(request, model)
    account.prompt_tokens = admission.expected_tokens(request, token_ids, model)
    return token_ids


def _candidate(request: generate_pb2.GenerateRequest, account: Account) -> Candidate:
    stopping = request.stopping
    return Candidate(
        account.model, account.prompt_tokens, stopping.max_tokens if stopping.HasField("max_tokens") else None
    )


def _enter(request: generate_pb2.GenerateRequest, admitted: _Admitted, account: Account) -> Entrant:
    """Now that the prompt has its full length, says how long the answer may be."""
    prompt, model = admitted.prompt, admitted.model
    job = admission.resolve(request, tuple(prompt.bare.token_ids), model)
    account.prompt_tokens = len(job.token_ids)
    answer = Answer(request, job, model)
    account.token_ids = answer.token_ids
    return Entrant(model.name, request.routing, prompt, job, answer, account)
