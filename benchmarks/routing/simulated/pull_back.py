"""What it would bring if prefill workers pulled blocks from decode workers: predicted_seconds with one more way to run.

Nothing in Baton does this. A prefill worker gets the blocks that only the decode worker of the pair has, and computes
the rest. The pull costs what a handoff of as many bytes costs, and is taken to be free for both workers.
"""

from benchmarks.routing.simulated.clock import StepCosts
from router.routing.policy import Candidates, RoutingRequest, W
from router.routing.prefix.predicted import Option, PredictedSeconds
from router.routing.prefix.rank_costs import DecodeRank, Matched, PrefillRank


class PullingBack(PredictedSeconds):
    """Adds, for each pair of which the decode worker has the longer prefix, the pair with a pull."""

    pull = StepCosts(1.0, 1, 1)  # what a pull takes

    def _options(self, request: RoutingRequest, candidates: Candidates[W], matched: Matched) -> list[Option[W]]:
        options = super()._options(request, candidates, matched)
        size, block_bytes = request.blocks.block_tokens, request.blocks.block_bytes
        # Options have only the decode workers that come first by other terms, or that can run the prompt.
        decodes = {id(decode): decode for _, _, decode in options}.values()
        prefills = {id(prefill): prefill for _, prefill, _ in options if prefill is not None}.values()
        for decode in decodes:
            here = PrefillRank(*DecodeRank(*decode).here)
            for fields in prefills:
                prefill = PrefillRank(*fields)
                missing = here.cached_tokens - prefill.cached_tokens
                if missing > 0:
                    seconds = self.pull.move_seconds + missing // size * block_bytes / self.pull.bytes_per_second
                    pulled = _with_pull(prefill, here.cached_tokens, seconds)
                    way = prefill.cost.link_to(here.cost)
                    moved = (request.prompt_tokens - here.cached_tokens) / size * block_bytes
                    arrival = pulled.first_token + way.seconds(moved)
                    options.append((arrival + here.late(arrival) + decode[0], pulled, decode))
        return options


def _with_pull(prefill: PrefillRank[W], cached_tokens: int, seconds: float) -> PrefillRank[W]:
    """The place with so many tokens cached after a pull of so many seconds."""
    gained = (cached_tokens - prefill.cached_tokens) * prefill.cost.prefill.slowness * prefill.cost.prefill.usual.rate
    compute = prefill.prefill - gained + seconds
    return prefill._replace(cached_tokens=cached_tokens, prefill=compute, first_token=prefill.wait + compute)
