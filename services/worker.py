"""WorkerService: what every worker answers, whatever its roles."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from baton.engine.v1 import worker_pb2, worker_pb2_grpc

from rpc.errors import Unsupported
from services import convert
from services.aborting import Aborter
from services.draining import Drainer
from services.engine import Engine
from services.kv_events import TellsKv
from services.watching import watch
from services.worker_engines import WorkerEngines


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """The model, the load, and the ends of requests and of the worker itself."""

    def __init__(self, epoch: int, engines: WorkerEngines, aborter: Aborter, drainer: Drainer) -> None:
        self._epoch = epoch
        self._engine: Engine = engines.engine
        self._facts = engines.facts
        self._load = engines.load
        self._aborter = aborter
        self._drainer = drainer

    async def GetModel(self, request: worker_pb2.GetModelRequest, context: Any) -> worker_pb2.GetModelResponse:
        return worker_pb2.GetModelResponse(card=convert.model_card(self._facts))

    async def GetLoad(self, request: worker_pb2.GetLoadRequest, context: Any) -> worker_pb2.GetLoadResponse:
        return worker_pb2.GetLoadResponse(load=convert.worker_load(self._load()))

    async def WatchLoad(
        self, request: worker_pb2.WatchLoadRequest, context: Any
    ) -> AsyncGenerator[worker_pb2.WatchLoadResponse, None]:
        async with aclosing(watch(self._load, convert.interval_seconds(request))) as loads:
            async for load in loads:
                yield worker_pb2.WatchLoadResponse(load=convert.worker_load(load))

    async def Abort(self, request: worker_pb2.AbortRequest, context: Any) -> worker_pb2.AbortResponse:
        return convert.abort_response(await self._aborter.abort(request.request_id))

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: Any
    ) -> AsyncGenerator[worker_pb2.DrainResponse, None]:
        async with aclosing(self._drainer.drain(convert.grace_seconds(request))) as stages:
            async for progress in stages:
                yield convert.drain_response(progress)
        # When the last message is on its way, and not before.
        context.add_done_callback(self._drainer.finish)

    async def SubscribeKvEvents(
        self, request: worker_pb2.SubscribeKvEventsRequest, context: Any
    ) -> AsyncGenerator[worker_pb2.SubscribeKvEventsResponse, None]:
        if not isinstance(self._engine, TellsKv):
            raise Unsupported(f"the {self._facts.engine} engine does not tell what its prefix cache holds")
        async with aclosing(self._engine.kv_changes()) as changes:
            sequence = 0
            async for change in changes:
                yield convert.kv_change(self._epoch, sequence, change)
                sequence += 1
