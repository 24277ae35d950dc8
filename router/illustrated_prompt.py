"""A prompt and its media: as a worker needs it that computes it, and as one needs it that gets its KV."""

from collections.abc import Sequence
from types import TracebackType

from baton.engine.v1 import prompt_pb2
from baton.inference.v1 import timing_pb2
from typing_extensions import Self

from router.account import Account
from router.embedder import Embedder, LoadedMedia, Order
from router.embeddings import Use
from router.expansion import expand
from router.together import together
from rpc.errors import EngineFailed


class IllustratedPrompt:
    """Has its embeddings from `embed` on, until `put_away` or `lose`, and gets them again where they are needed again.

    A context manager: leaving it puts them away. Without media there is nothing to get, and nothing to put away.
    """

    def __init__(
        self,
        prompt: prompt_pb2.Prompt,
        placeholder: int,
        media: Sequence[LoadedMedia],
        order: Order,
        embedder: Embedder,
    ) -> None:
        self._prompt = prompt
        self._placeholder = placeholder
        self._media = media
        self._order = order
        self._embedder = embedder
        self._uses: dict[int, Use] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.put_away()

    @property
    def bare(self) -> prompt_pb2.Prompt:
        """The ids, and which media stand where; their embeddings are left out. Complete after the first `embed`."""
        return self._prompt

    @property
    def embedding_layout(self) -> str:
        """What a worker must be able to read to compute it; empty asks for nothing."""
        return self._order.encoder.layout if self._media else ""

    async def embed(self, account: Account) -> None:
        """Gets the embeddings that are not here. Notes in the account what that took."""
        if len(self._uses) == len(self._media):
            return
        missing = [index for index in range(len(self._media)) if index not in self._uses]
        with account.ledger.attempt(timing_pb2.STAGE_ENCODE) as waiting:
            await together(self._embed(index) for index in missing)
            # Media are encoded side by side: whoever came last was waited for.
            waiting.worker_id = next((use.worker_id for use in reversed(self._uses.values()) if not use.was_cached), "")
        account.embedded([self._uses[index] for index in missing])
        self._place([self._uses[index] for index in range(len(self._media))])

    async def computable(self, account: Account) -> prompt_pb2.Prompt:
        """The whole, with embeddings that can be read from now on."""
        await self.embed(account)
        if not self._media:
            return self._prompt
        whole = prompt_pb2.Prompt()
        whole.CopyFrom(self._prompt)
        for index, span in enumerate(whole.media):
            span.embedding.CopyFrom(self._uses[index].message())
        return whole

    def put_away(self) -> None:
        """Needs the embeddings no more, for now."""
        for use in self._uses.values():
            use.close()
        self._uses.clear()

    def lose(self) -> None:
        """A worker could not read an embedding; it does not say which."""
        for use in self._uses.values():
            use.lost()
        self.put_away()

    async def _embed(self, index: int) -> None:
        self._uses[index] = await self._embedder.embed(self._media[index], self._order)

    def _place(self, uses: Sequence[Use]) -> None:
        """Expands the placeholders. Encoded anew, the media must take the places that they have."""
        digests = [use.encoded.embedding.digest for use in uses]
        if self._prompt.media:
            if digests != [span.digest for span in self._prompt.media]:
                raise EngineFailed("a medium that was encoded again has become another embedding", stage="encode")
            return
        expanded = expand(self._prompt.token_ids, self._placeholder, [use.num_tokens for use in uses])
        spans = [
            prompt_pb2.MediaSpan(start=start, num_tokens=use.num_tokens, digest=digest)
            for start, use, digest in zip(expanded.starts, uses, digests, strict=True)
        ]
        self._prompt = prompt_pb2.Prompt(token_ids=expanded.token_ids, cache_salt=self._prompt.cache_salt, media=spans)
