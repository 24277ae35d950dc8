"""The warming of a prefix cache: before an answer moves here, what its worker has lent of it is pulled."""

from dataclasses import replace

from baton.errors import InvalidRequest
from services.engines.base import Engine
from services.engines.prompt import Prompt, Sampling
from services.handoff.pull import Puller
from services.handoff.remote_handoff import Handoff
from services.requests.calls import RunningCall
from services.requests.loras import using_lora
from services.requests.prompts import check_limits


class Warmer:
    """Pulls what other workers have lent into the prefix cache of an engine."""

    def __init__(self, engine: Engine, puller: Puller) -> None:
        self._engine = engine
        self._puller = puller

    async def warm(self, handoff: Handoff, prompt: Prompt, call: RunningCall) -> int:
        """Pulls the lent part of a prompt and its answer. Returns how many bytes.

        Raises InvalidRequest for a part that cannot be one, and as Puller.pull.
        """
        lent = _lent(prompt, handoff.num_tokens)
        await check_limits(self._engine.facts, lent, Sampling(max_tokens=1))
        async with using_lora(self._engine, lent), self._puller.pull(handoff, lent, call) as pulled:
            reservation = pulled.kv.reservation
            await reservation.cache(len(reservation.block_ids))
            return sum(timing.num_bytes for timing in pulled.timings)


def _lent(prompt: Prompt, num_tokens: int) -> Prompt:
    """The part of a prompt and its answer that was lent, as a prompt of which the next id is known.

    Raises InvalidRequest if it has no such id, or if it ends within the media.
    """
    context = prompt.context
    if not 0 < num_tokens < len(context):
        raise InvalidRequest.of(
            "handoff.num_tokens", f"{num_tokens} is not within the {len(context)} ids that are given"
        )
    if any(span.start + span.num_tokens > num_tokens for span in prompt.media):
        raise InvalidRequest.of("handoff.num_tokens", f"{num_tokens} ids do not contain the prompt's media")
    return replace(prompt, token_ids=context[:num_tokens], emitted=(context[num_tokens],))
