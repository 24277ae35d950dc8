"""The work of a decode, as its request describes it."""

from collections.abc import Callable
from dataclasses import dataclass

from baton.engine.v1 import decode_pb2
from baton.errors import InvalidRequest
from services.engines.journal.slots import Slot
from services.engines.kv import Reservation
from services.engines.prompt import Prompt, Sampling
from services.handoff.borrowing import PrefixSource, read_source
from services.handoff.remote_handoff import Handoff, read_handoff
from services.multimodal.media_resolver import MediaResolver
from services.multimodal.media_spans import read_spans
from services.requests.prompts import read_prompt, read_sampling
from services.resume.takeover import no_slot
from services.telemetry.timings import CallClock


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """A request to decode. Without a handoff its prompt is computed here."""

    request_id: str
    prompt: Prompt
    sampling: Sampling
    handoff: Handoff | None
    destination_id: str = ""  # blocks that were allocated for it before; empty without them
    source: PrefixSource | None = None  # another worker that may have the beginning of the prompt
    reservation: Reservation | None = None  # what the worker's last process has computed of it
    open_slot: Callable[[], Slot | None] = no_slot  # in the journal, before it begins


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Reads requests of DecodeService. Its methods raise InvalidRequest with the field that is wrong."""

    media: MediaResolver

    async def prompt(
        self,
        request: decode_pb2.AllocateRequest
        | decode_pb2.DecodeRequest
        | decode_pb2.PrefetchRequest
        | decode_pb2.WarmRequest,
    ) -> Prompt:
        """The prompt with the embeddings that the request contains."""
        given = await read_prompt(request, self.media.facts)
        return self.media.with_inline_embeddings(given, read_spans(request.prompt))

    async def work(self, request: decode_pb2.DecodeRequest, clock: CallClock) -> DecodeWork:
        """The work of a decode, with all embeddings if its prompt is computed here; `clock` gets their time."""
        sampling = read_sampling(request.sampling)
        if request.HasField("handoff"):
            prompt = await self.prompt(request)
            handoff = read_handoff(request.handoff)
            return DecodeWork(request.request_id, prompt, sampling, handoff, request.destination_id)
        if request.destination_id:
            raise InvalidRequest.of("destination_id", "comes without a handoff")
        given = await read_prompt(request, self.media.facts)
        prompt = await self.media.with_embeddings(given, read_spans(request.prompt), clock)
        return DecodeWork(request.request_id, prompt, sampling, handoff=None, source=read_source(request))
