"""One answer that goes on: on the worker that still runs it, or, from the ids that its client has, on another."""

from baton.engine.v1 import prompt_pb2
from baton.errors import EmbeddingLost, StreamLost
from baton.inference.v1 import generate_pb2
from router.context import RequestContext
from router.decoding.state import Executor
from router.execution import RequestExecution
from router.multimodal.prompt import MultimodalPrompt
from router.resume.attaching import Adopted
from router.resume.replay import ReplayedCompletion
from router.routing.policy import Placement
from router.stream.writer import StreamWriter
from router.text.completion import Finish, TokenDelta
from router.text.served_model import ServedModel
from router.workers.handle import WorkerHandle

_NOTHING = TokenDelta("")


class ResumedExecution(RequestExecution):
    """One answer of which the first ids are known, and some of them are its client's already.

    `adopted` is its decode, if a worker has it; it is read on. Without it the prompt and the ids are computed again.
    """

    def __init__(
        self,
        executor: Executor,
        ctx: RequestContext,
        prompt: MultimodalPrompt,
        completion: ReplayedCompletion,
        stream: StreamWriter,
        adopted: Adopted | None = None,
    ) -> None:
        super().__init__(executor, ctx, prompt, completion, stream)
        self._replay = completion
        self._taken = adopted
        self._adopted = adopted.decode if adopted else None
        self._resumptions = adopted.decode.reader.attachment - 1 if adopted else 1

    async def run(self) -> None:
        """Sends what the client lacks, then decodes to the end. The tenant has paid for what a client or router has."""
        state = self._state
        keep = state.ctx.keep
        assert keep is not None
        state.stats.charged_tokens = keep.of(state.ctx.answer).have.tokens
        if self._adopted is not None:
            read_tokens = self._adopted.attached.read_tokens
            state.stats.charged_tokens = max(state.stats.charged_tokens, read_tokens)
        if self._adopted is None and not state.completion.token_ids:
            await super().run()
            return
        state.stats.completion_tokens = len(state.completion.token_ids)
        try:
            if self._adopted is None and state.completion.finished is not None:
                # Only its end is missing.
                self._send_first(
                    generate_pb2.Started(model=state.prompt.model, prompt_tokens=state.stats.prompt_tokens)
                )
            else:
                await self._decode_with_retries(await self._place_again())
        finally:
            state.progress.close()
            await state.release_handoff()
        self._finish()

    async def _place_again(self) -> Placement[WorkerHandle]:
        if self._adopted is not None:
            return Placement(self._adopted.worker)
        lost = StreamLost("no worker has the answer any more")
        return self._state.follow(await self._failover.another_decode(lost, frozenset()))

    def _start(self, placement: Placement[WorkerHandle]) -> None:
        if not self._has_started:
            self._send_first(self._started(placement))

    def _started(self, placement: Placement[WorkerHandle]) -> generate_pb2.Started:
        if self._adopted is None or self._taken is None:
            return super()._started(placement)
        keep = self._state.ctx.keep
        assert keep is not None
        self._known = self._taken.record.started
        self._known.resumption.handle = keep.handle.at(placement.decode.record.worker_id).text
        return self._known

    def _send_first(self, started: generate_pb2.Started) -> None:
        self._has_started = True
        keep = self._state.ctx.keep
        assert keep is not None
        recomputed = self._adopted is None or keep.is_partly_lost
        resumed = generate_pb2.Resumed(started=started, recomputed=recomputed, attempt=keep.attempt or 0)
        self._state.stream.start(resumed)
        if (missing := self._replay.missing) != _NOTHING:
            self._state.stream.put_now(missing)

    async def _decode_prompt(self) -> prompt_pb2.Prompt:
        try:
            return await super()._decode_prompt()
        except EmbeddingLost:
            if self._taken is not None:
                # The next router to resume it would be told the same, also if it has the request.
                await self._state.calls.forget(self._taken.decode)
            raise

    def _fill_finished(self, finish: Finish, finished: generate_pb2.Finished) -> None:
        super()._fill_finished(finish, finished)
        finished.resumptions = self._resumptions


async def resume(
    executor: Executor,
    ctx: RequestContext,
    prompt: MultimodalPrompt,
    completion: ReplayedCompletion,
    stream: StreamWriter,
) -> None:
    """Runs an answer to its end from what its client has received. The caller releases `prompt`."""
    await ResumedExecution(executor, ctx, prompt, completion, stream).run()


def completion_of(
    ctx: RequestContext, sampling: prompt_pb2.Sampling, model: ServedModel, prompt: MultimodalPrompt
) -> ReplayedCompletion:
    """The completion of an answer that goes on from what its client has received. Raises PositionInvalid."""
    assert ctx.keep is not None
    continued = ctx.keep.of(ctx.answer)
    completion = ReplayedCompletion(ctx.request, sampling, model, prompt.answer_parser(model), continued.have)
    completion.replay(continued.received)
    return completion
