"""/v1/completions: one prompt, as text or token ids."""

from typing import Annotated, Literal

from pydantic import Field

from baton.inference.v1 import generate_pb2
from router.openai.fields import SamplingFields, Uint32, refuse


class CompletionRequest(SamplingFields):
    """The body of a request."""

    prompt: str | list[str] | list[Uint32] | list[list[Uint32]]
    max_tokens: Uint32 | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    best_of: Uint32 | None = None

    def generate_request(self, request_id: str) -> generate_pb2.GenerateRequest:
        """The request to the pipeline. Raises Unsupported for what would have to be ignored."""
        made = self.request(request_id)
        if self.best_of is not None and self.best_of != (1 if self.n is None else self.n):
            raise refuse("best_of", "all answers are returned; ask for them with n")
        match self.prompt:
            case str():
                made.prompt = self.prompt
            case [str() as text]:
                made.prompt = text
            case [list() as ids]:
                made.token_ids.ids.extend(one for one in ids if isinstance(one, int))
            case [int(), *_]:
                made.token_ids.ids.extend(one for one in self.prompt if isinstance(one, int))
            case []:
                made.prompt = ""
            case _:
                raise refuse("prompt", "one prompt a request; send several requests at the same time")
        # OpenAI's default.
        made.stopping.max_tokens = 16 if self.max_tokens is None else self.max_tokens
        if self.logprobs is not None:
            made.response.logprobs = self.logprobs
        return made
