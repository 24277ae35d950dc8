"""/v1/completions: one prompt, as text or token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from baton.inference.v1 import generate_pb2
from router.openai.choices import TokenText, named_logprobs
from router.openai.fields import SamplingFields, Uint32, refuse


class CompletionRequest(SamplingFields):
    """The body of a request."""

    prompt: str | list[str] | list[Uint32] | list[list[Uint32]]
    max_tokens: Uint32 | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: Literal[""] | None = None
    best_of: Uint32 | None = None

    def generate_request(self, request_id: str) -> generate_pb2.GenerateRequest:
        """The request to the pipeline. Raises Unsupported for what would have to be ignored."""
        made = self.request(request_id)
        if self.best_of is not None and self.best_of != (1 if self.n is None else self.n):
            raise refuse("best_of", "all answers are returned; ask for them with n")
        if self.echo and self.stream:
            raise refuse("echo", "a prompt is not streamed")
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
            if self.echo:
                made.response.prompt_logprobs = self.logprobs
        return made


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """The prompt of a request with `echo`, which its choices begin with. `token_text` names tokens in logprobs."""

    text: str
    token_ids: Sequence[int]
    token_text: TokenText

    def put_before(self, body: dict[str, Any], reported: generate_pb2.PromptLogprobs) -> None:
        """Adds it to a whole answer. `reported` is used if the choices have log probabilities."""
        before = self._logprobs(reported) if body["choices"][0]["logprobs"] else None
        for choice in body["choices"]:
            choice["text"] = self.text + choice["text"]
            if before is None or choice["logprobs"] is None:
                continue
            length = sum(map(len, before["tokens"]))
            after = choice["logprobs"]
            after["text_offset"] = [length + offset for offset in after["text_offset"]]
            choice["logprobs"] = {name: values + after[name] for name, values in before.items()}

    def _logprobs(self, reported: generate_pb2.PromptLogprobs) -> dict[str, list[Any]]:
        """Log probabilities as of an answer; the first token follows nothing, so that it has none."""
        tokens = [self.token_text(token_id) for token_id in self.token_ids]
        offsets = [0]
        for token in tokens[:-1]:
            offsets.append(offsets[-1] + len(token))
        tops = zip(_rows(reported.top_token_ids, reported.top), _rows(reported.top_logprobs, reported.top), strict=True)
        return {
            "tokens": tokens,
            "token_logprobs": [None, *reported.logprobs],
            "top_logprobs": [None, *(named_logprobs(self.token_text, ids, values) for ids, values in tops)],
            "text_offset": offsets,
        }


def _rows(values: Sequence[Any], width: int) -> list[Sequence[Any]]:
    return [values[start : start + width] for start in range(0, len(values), width)] if width else []
