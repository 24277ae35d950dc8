"""How long a request would take, from how fast the workers were of late and what they have to do."""

from dataclasses import dataclass

from router.cluster import Cluster
from router.pace import Average
from router.worker import Worker


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request that wants in. `max_tokens` is None if it runs until the model ends it."""

    model: str
    prompt_tokens: int
    max_tokens: int | None


class Forecast:
    """Says nothing about what was not measured within the last seconds: then a request is let in, and measured."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._share = Average()  # of max_tokens that requests use
        self._length = Average()  # of those without max_tokens

    def seconds(self, candidate: Candidate) -> float | None:
        """From now to the last token, on the workers that would be quickest; None if that is not known."""
        workers = [
            worker
            for worker in self._cluster.workers
            if worker.record.model == candidate.model and not worker.problem and not worker.record.draining
        ]
        decode = [worker for worker in workers if "decode" in worker.record.roles]
        prefill = [worker for worker in workers if "prefill" in worker.record.roles] or decode
        prompts = [_prompt_seconds(worker, candidate.prompt_tokens) for worker in prefill]
        tokens = [_token_seconds(worker, self._tokens(candidate)) for worker in decode]
        known_prompts = [seconds for seconds in prompts if seconds is not None]
        known_tokens = [seconds for seconds in tokens if seconds is not None]
        # One that nothing is known of may be quick.
        if (
            not known_prompts
            or not known_tokens
            or len(known_prompts) < len(prompts)
            or len(known_tokens) < len(tokens)
        ):
            return None
        return min(known_prompts) + min(known_tokens)

    def learn(self, candidate: Candidate, generated: int) -> None:
        """A request has come to its end."""
        if candidate.max_tokens is None:
            self._length.add(generated)
        else:
            self._share.add(generated / max(1, candidate.max_tokens))

    def _tokens(self, candidate: Candidate) -> float:
        if candidate.max_tokens is None:
            return self._length.value or 1.0
        return candidate.max_tokens * (self._share.value or 0.0)


def _prompt_seconds(worker: Worker, prompt_tokens: int) -> float | None:
    prompts = worker.pace.prompts
    speed = prompts.per_second
    return None if speed is None else (prompts.waiting_tokens + prompt_tokens) / speed


def _token_seconds(worker: Worker, tokens: float) -> float | None:
    step = worker.pace.token_seconds.value
    return None if step is None else (worker.pace.entry_seconds.value or 0.0) + tokens * step
