"""The state of one request on its workers, and what it holds there."""

from dataclasses import dataclass

from baton.engine.v1 import handoff_pb2
from baton.errors import BatonError
from baton.inference.v1 import generate_pb2
from discovery.registry import WorkerRecord
from router.context import RequestContext
from router.moving.decodes import ReadDecodes, Yielded
from router.multimodal.prompt import MultimodalPrompt
from router.placement.placer import Placer
from router.routing.policy import IgnoredProgress, Placement, Progress, RoutingRequest, needed_capabilities
from router.routing.retry import Attempts, Retries
from router.stream.meter import TokenMeter
from router.stream.writer import StreamWriter
from router.telemetry.request_metrics import TokenLatencies
from router.text.completion import Completion
from router.workers.calls import WorkerCalls
from router.workers.destinations import Destination, Prefetch
from router.workers.handle import WorkerHandle
from router.workers.replies import Suspects
from router.workers.watching.waiting_calls import Waiting
from runtime.aio import run_to_completion


@dataclass(frozen=True, slots=True)
class HeldHandoff:
    """KV that a prefill worker holds until the decode worker confirms that it has taken it over."""

    owner: WorkerHandle
    handoff: handoff_pb2.KvHandoff


@dataclass(frozen=True, slots=True)
class Executor:
    """The parts that all requests share: `placer` chooses their workers, and those in `decodes` can be moved."""

    placer: Placer
    retries: Retries
    decodes: ReadDecodes


class ExecutionState(Waiting):
    """One request on its workers. Attributes, which its stages set."""

    def __init__(
        self,
        executor: Executor,
        ctx: RequestContext,
        prompt: MultimodalPrompt,
        completion: Completion,
        stream: StreamWriter,
    ) -> None:
        self.placer = executor.placer
        self.decodes = executor.decodes
        self.retries = executor.retries
        self.ctx = ctx
        self.stats = ctx.stats
        self.prompt = prompt
        self.completion = completion
        self.stream = stream
        self.meter = TokenMeter(ctx.stats, TokenLatencies(ctx.stats), completion.token_ids)
        self.calls = WorkerCalls(ctx, prompt.model, completion.sampling, prompt.serialized)
        self.routing_request = _routing_request(ctx, prompt, completion.sampling.stop.max_tokens)
        if ctx.notes is not None:
            ctx.notes.runs(self.routing_request, completion)
        self.progress: Progress = IgnoredProgress()
        self.attempts: Attempts | None = None  # at the present stage
        self.suspects: Suspects | None = None  # once a worker has given a reply that it may not give
        self.yielded: Yielded | None = None  # by the last decode, until the next one has given a token
        self.has_gap = False  # tokens of the answer were lost: what its client has cannot be continued
        self.has_moved = False  # a decode that knew what was cached of the prompt has yielded
        self.reattached_after: tuple[str, int] | None = None  # the process that was lost, and the tokens until then
        self.held: HeldHandoff | None = None
        # Of engines that allocate first: until their decode has accepted it.
        self.destination: Destination | None = None
        # Of long prompts: until their decode has taken over what is read while they are computed.
        self.prefetch: Prefetch | None = None

    def follow(self, placement: Placement[WorkerHandle]) -> Placement[WorkerHandle]:
        """Reports to the policy what happens to the request, from now on under this placement."""
        self.progress.close()
        self.progress = placement.progress
        if self.ctx.notes is not None:
            self.ctx.notes.placed(placement)
        return placement

    def suspect(self, worker: WorkerHandle, stage: str, error: BatonError) -> None:
        """Notes a worker that has failed, in case that its reply was wrong."""
        self.suspects = self.suspects or Suspects()
        self.suspects.add(worker, stage, error)

    def await_answer(self, tokens: int) -> None:
        """Begins to wait for a worker's answer, before which it computes `tokens`; see Waiting."""
        self.awaits_answer, self.asked_at, self.tokens = True, None, tokens

    def answer_seconds(self) -> float:
        return self.retries.answer_seconds(self.ctx.deadline.remaining_seconds)

    def silence_seconds(self) -> float:
        # While the client is behind, its worker is paused.
        return self.retries.silence_seconds if self.stream.lane.is_writable else 0.0

    def num_tokens(self) -> int:
        return len(self.completion.token_ids)

    def another_can(self, worker: WorkerRecord) -> bool:
        """True if the call can be given up: another worker could answer, or the answer is complete without its end."""
        if self.completion.finished is not None:
            return True
        if self.held and self.yielded:
            return worker.process != self.held.owner.record.process
        attempts = self.attempts
        if attempts is None or not attempts.has_another or self.is_disaggregated:
            return False
        tried = attempts.tried | {worker.process}
        return self.placer.can_decode(self.routing_request, self.context_tokens, tried)

    def give_up(self) -> None:
        if self.prefetch is not None:
            self.prefetch.cancel()

    @property
    def ends_here(self) -> bool:
        """True if the answer has ended by what its worker does not know of, such as a stop string."""
        return self.completion.finished is not None and self.completion.finished.is_unknown_to_worker

    @property
    def is_disaggregated(self) -> bool:
        """True if the request must not run whole on one worker."""
        return self.routing_request.routing.topology == generate_pb2.TOPOLOGY_DISAGGREGATED

    @property
    def context_tokens(self) -> int:
        """The context length that a worker needs to continue the request."""
        return self.routing_request.prompt_tokens + len(self.completion.token_ids) + 1

    async def release_handoff(self) -> None:
        """Frees the KV that no decode worker has taken over, and what was allocated or read for it; all of it also if
        the request is cancelled meanwhile, by its client beside its deadline.
        """
        held, self.held = self.held, None
        destination, self.destination = self.destination, None
        prefetch, self.prefetch = self.prefetch, None
        if held or destination or prefetch:
            await run_to_completion(self._release(held, destination, prefetch))

    async def leave_handoff(self, worker: WorkerHandle) -> None:
        """Leaves the KV to a kept decode that has begun: it confirms or frees it. Otherwise it is still held here."""
        if self.ctx.keep is not None and self.held is not None:
            held = self.held
            if await run_to_completion(self.calls.has_begun(worker)) and self.held is held:
                self.held = None

    async def _release(
        self, held: HeldHandoff | None, destination: Destination | None, prefetch: Prefetch | None
    ) -> None:
        if prefetch:
            await prefetch.end()
        if held:
            await self.calls.release(held.owner, held.handoff)
        if destination:
            await self.calls.release_destination(destination)


def _routing_request(ctx: RequestContext, prompt: MultimodalPrompt, answer_tokens: int) -> RoutingRequest:
    return RoutingRequest(
        prompt.model,
        prompt.without_embeddings,
        ctx.request.routing,
        prompt.embedding_layout,
        answer_tokens=answer_tokens,
        token_ids=prompt.token_ids,
        needs=needed_capabilities(ctx.request),
    )
