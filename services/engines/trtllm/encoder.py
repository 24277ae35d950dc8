"""TensorRT-LLM's encode role: `MultimodalEncoder`, whose embeddings are copied to host memory at once.

The encoder returns handles on GPU memory of this host, each for one reader. Baton caches embeddings, shares them and
moves them between hosts, so this process reads them, and sends bytes.
"""

import asyncio
import hashlib
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from io import BytesIO
from typing import Any

from PIL import Image
from typing_extensions import Self

from baton.errors import BatonError, EngineFailed, InvalidRequest, Overloaded
from runtime.threads import daemon_call
from services.engines.base import EncoderLoad, ModelFacts
from services.engines.external.package import shut_down
from services.engines.prompt import Embedding, Media
from services.engines.running.canary import Canary
from services.engines.trtllm.config import TrtllmConfig
from services.engines.trtllm.loading import load_encoder
from services.engines.trtllm.model_facts import encoder_facts
from services.engines.trtllm.package import Package
from services.engines.trtllm.resolved_args import ResolvedArgs

_WARM_UP = Image.new("RGB", (64, 64), (128, 128, 128))


class TrtllmEncoder:
    """An Encoder. It encodes one batch of images at a time, in a thread."""

    def __init__(self, config: TrtllmConfig, effective: ResolvedArgs, package: Package) -> None:
        self._config = config
        self._effective = effective
        self._package = package
        self._batch = effective.value.max_batch_size
        self._turn = asyncio.Lock()
        self._unfinished = self._running = 0
        self._began_at = 0.0
        self._is_tested = False
        self._failure: EngineFailed | None = None
        self._quiet_since = time.monotonic()
        self._canary = Canary(self._ask, self._quiet_seconds, config.canary_seconds, config.canary_patience_seconds)

    async def __aenter__(self) -> Self:
        facts = encoder_facts(self._config, self._effective.value, self._package)
        assert facts.images is not None
        self._rules = facts.images
        started = time.monotonic()
        self._encoder = await asyncio.to_thread(load_encoder, self._config, self._effective, self._package)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(shut_down, self._encoder, "trtllm")
            await self._in_thread([_WARM_UP])
            await stack.enter_async_context(self._canary)
            self._open = stack.pop_all()
        self._facts = replace(facts, load_seconds=time.monotonic() - started)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._open.aclose()

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def healthy(self) -> bool:
        """By its own check, by earlier failures, by the duration of the current batch, and by test images."""
        if self._failure is not None or (self._running and self._seconds > self._config.stall_seconds):
            return False
        if self._canary.is_overdue:
            return False
        check = getattr(self._encoder, "_check_health", None)
        return check is None or bool(check())

    @property
    def responsive(self) -> bool:
        """False also while a test request takes far longer than usual."""
        return self.healthy and not self._canary.is_late

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began_at

    def load(self) -> EncoderLoad:
        """Returns the images in the current batch, and those that wait."""
        running = 0 if self._is_tested else self._running
        return EncoderLoad(running, max(0, self._unfinished - running))

    async def encode(self, media: Sequence[Media]) -> list[Embedding]:
        """Returns one embedding for each image. See EncodeEngine."""
        if self._unfinished and self._unfinished + len(media) > self._config.max_waiting:
            raise Overloaded(f"{self._unfinished} images wait already", retry_after_seconds=1.0)
        self._unfinished += len(media)
        try:
            found: list[Embedding] = []
            for start in range(0, len(media), self._batch):
                found += await self._encode(media[start : start + self._batch])
            return found
        finally:
            self._unfinished -= len(media)

    async def _encode(self, media: Sequence[Media]) -> list[Embedding]:
        if self._failure is not None:
            raise self._failure
        images = await asyncio.to_thread(_opened, media)
        tensors = await self._in_thread(images)
        return [self._embedding(one, tensor) for one, tensor in zip(media, tensors, strict=True)]

    async def _in_thread(self, images: Sequence[Image.Image], *, is_test: bool = False) -> list[Any]:
        await self._turn.acquire()
        self._is_tested = is_test
        self._running, self._began_at = len(images), time.monotonic()
        looking = daemon_call(partial(self._look, images), "trtllm-encoder")
        # Released when the batch ends: a caller that is cancelled leaves it running.
        looking.add_done_callback(self._looked)
        await asyncio.wait([looking])
        if (error := looking.exception()) is not None:
            raise self._why(error) from error
        return looking.result()

    async def _ask(self) -> None:
        await self._in_thread([_WARM_UP], is_test=True)

    def _quiet_seconds(self) -> float:
        """Returns the time since the last batch; 0 while a client's is computed, which may take long."""
        return 0.0 if self._running and not self._is_tested else time.monotonic() - self._quiet_since

    def _looked(self, looking: "asyncio.Future[list[Any]]") -> None:
        self._quiet_since = time.monotonic()
        self._running = 0
        self._turn.release()
        if (error := looking.exception()) is not None:
            self._why(error)

    def _look(self, images: Sequence[Image.Image]) -> list[Any]:
        asked = [{"prompt": self._rules.placeholder, "multi_modal_data": {"image": [image]}} for image in images]
        return [self._rows_of(result) for result in self._encoder.generate(asked)]

    def _why(self, error: BaseException) -> BatonError:
        """Converts an error. One that is not a RequestError fails the encoder for good."""
        if isinstance(error, BatonError):
            return error
        failed = EngineFailed(f"TensorRT-LLM failed: {type(error).__name__}: {error}")
        if not isinstance(error, self._package.request_error):
            self._failure = failed
        return failed

    def _rows_of(self, result: Any) -> Any:
        """Returns the rows in host memory. Reading a handle uses it up, so that the engine can free its memory."""
        params = result.disaggregated_params
        handles = params.multimodal_embedding_handles if params is not None else None
        if not handles or len(handles) != 1:
            raise EngineFailed(f"TensorRT-LLM answered {len(handles or ())} embeddings for one image")
        rows = self._package.shared_tensor().from_dict(handles[0]).get_local_view()
        if rows.dim() != 2 or rows.shape[1] != self._rules.hidden_size:
            raise EngineFailed(f"an embedding of shape {tuple(rows.shape)} has no rows of {self._rules.hidden_size}")
        return rows.cpu().clone()

    def _embedding(self, media: Media, rows: Any) -> Embedding:
        import torch

        dtype = self._rules.embedding_layout.dtype
        data = rows.to(getattr(torch, dtype)).contiguous().view(torch.uint8).numpy().tobytes()
        digest = hashlib.sha256(self._rules.encoder_fingerprint.encode() + media.content).digest()
        return Embedding(digest, (int(rows.shape[0]), int(rows.shape[1])), dtype, data)


def _opened(media: Sequence[Media]) -> list[Image.Image]:
    opened: list[Image.Image] = []
    for one in media:
        try:
            opened.append(Image.open(BytesIO(one.content)).convert("RGB"))
        except (OSError, ValueError) as error:
            raise InvalidRequest.of(f"media[{len(opened)}]", f"cannot be read: {error}") from error
    return opened
