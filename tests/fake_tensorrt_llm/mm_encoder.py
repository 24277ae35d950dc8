"""The stand-in's MultimodalEncoder: rows that follow from the image, given away by handles."""

import hashlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fake_tensorrt_llm.prompts import PromptReader
from fake_tensorrt_llm.shared_tensor import MEMORY, SharedTensorContainer
from fake_tensorrt_llm.tables import VersionTable

ENCODERS: list["MultimodalEncoder"] = []


class MultimodalEncoder:
    """Accepts what an LLM accepts; `table` and `params_type` are set by the subclass of a version."""

    table: VersionTable
    params_type: type
    passed: dict[str, Any]  # the arguments, without those that have their defaults

    def __new__(cls, *arguments: Any, **passed: Any) -> "MultimodalEncoder":
        made = super().__new__(cls)
        made.passed = passed
        return made

    def __init__(
        self,
        model: str,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        **kwargs: Any,
    ) -> None:
        self.given = {"tensor_parallel_size": tensor_parallel_size, "dtype": dtype, **kwargs}
        self.args = self.table.arguments.pytorch(model=model, trust_remote_code=trust_remote_code, **self.given)
        self._reader = PromptReader(Path(model))
        self.crash: Exception | None = None
        self.down = False
        self.batches: list[int] = []
        self.seconds = 0.0
        self._at_once = self.most_at_once = 0
        self._given_away: dict[int, Any] = {}
        ENCODERS.append(self)

    def shutdown(self) -> None:
        """Forgets everything."""
        self.down = True
        if self in ENCODERS:
            ENCODERS.remove(self)

    @property
    def unread(self) -> int:
        """Embeddings that it has to keep, because they were not read yet."""
        return sum(number in MEMORY for number in self._given_away)

    def _check_health(self) -> bool:
        return not (self.down or self.crash)

    def generate(self, inputs: Any) -> list[Any]:
        """Synchronous; one result for each input."""
        if self.crash is not None:
            raise self.crash
        if not isinstance(inputs, list):
            raise ValueError("a list is needed")
        self.batches.append(len(inputs))
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        time.sleep(self.seconds)
        self._at_once -= 1
        return [self._one(asked) for asked in inputs]

    def _one(self, asked: dict[str, Any]) -> Any:
        images = asked["multi_modal_data"]["image"]
        if self._reader.tokenize(asked["prompt"]).count(self._reader.image_token) != len(images):
            raise ValueError("the numbers of placeholders and of images differ")
        handles = [self._give_away(self._rows(image)) for image in images]
        params = self.params_type(multimodal_embedding_handles=handles)
        return SimpleNamespace(disaggregated_params=params, finished=True)

    def _give_away(self, rows: Any) -> dict[str, Any]:
        handle = SharedTensorContainer.from_device(rows).dump_to_dict()
        self._given_away[handle["storage_handle"]] = rows
        return handle

    def _rows(self, image: Any) -> Any:
        digest = hashlib.sha256(image.convert("RGB").tobytes()).digest()
        noise = torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))
        rows = 3 + digest[6] % 4
        return torch.randn(rows, self._reader.hidden_size, generator=noise).to(torch.bfloat16)


def encoder_of(table: VersionTable, params_type: type) -> type[MultimodalEncoder]:
    """MultimodalEncoder of one version."""
    return type("MultimodalEncoder", (MultimodalEncoder,), {"table": table, "params_type": params_type})
