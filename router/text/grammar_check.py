"""Checks the grammars of guided requests before any worker is called, beside the event loop."""

from collections import OrderedDict
from functools import partial

from typing_extensions import Self

from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2
from grammars.guide import Guide, read_guide
from grammars.source import check_guide
from grammars.tasks import GrammarThread
from router.text.parsing.tool_grammar import guided_calls, name_tools, wants_guided_calls
from router.text.served_model import ServedModel

_REMEMBERED = 128


class GrammarCheck:
    """Remembers the latest grammars, so that each is checked once. A context manager, which ends its thread.

    It needs no vocabulary: only a special token that is named in a grammar, and missing from the model, is found by the
    worker instead.
    """

    def __init__(self, seconds: float) -> None:
        self._thread = GrammarThread(seconds)
        self._known: OrderedDict[Guide, InvalidRequest | None] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.close()

    async def prepare(self, request: generate_pb2.GenerateRequest, model: ServedModel) -> None:
        """Checks the request's grammar, and sets it where tools need one. Raises InvalidRequest and Unsupported."""
        if request.HasField("chat") and wants_guided_calls(request.chat):
            await self._guide_calls(request, model)
        elif request.HasField("guided"):
            await self.check(request.guided)

    async def _guide_calls(self, request: generate_pb2.GenerateRequest, model: ServedModel) -> None:
        if request.HasField("guided"):
            raise InvalidRequest.of("guided", "cannot be combined with strict tools or a tool choice")
        if not model.capabilities.guided_decoding:
            raise model.unsupported("guided decoding, which strict tools and a tool choice need")
        guided = guided_calls(request.chat, model.tokenizer.tool_format if model.tokenizer else None)
        try:
            await self.check(guided)
        except InvalidRequest as error:
            raise name_tools(error, request.chat) from None
        request.guided.CopyFrom(guided)

    async def check(self, message: generate_pb2.GuidedDecoding) -> None:
        """Raises InvalidRequest naming the field and, in a schema, the keyword; Overloaded if too many are waiting."""
        guide = read_guide(message)
        if guide not in self._known:
            self._remember(guide, await self._thread.run(partial(_error_of, guide)))
        self._known.move_to_end(guide)
        error = self._known[guide]
        if error is not None:
            raise InvalidRequest(error.violations)

    def _remember(self, guide: Guide, error: InvalidRequest | None) -> None:
        self._known[guide] = error
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)


def _error_of(guide: Guide) -> InvalidRequest | None:
    try:
        check_guide(guide)
    except InvalidRequest as error:
        return error
    return None
