"""The stand-in's handles on embeddings: they do not own the memory. One on device memory is good for one reader."""

import itertools
import weakref
from typing import Any

_numbers = itertools.count(1)
# By the number in a handle. Device memory whose handle was not read yet cannot be freed by its owner.
MEMORY: dict[int, "weakref.ref[Any]"] = {}


class SharedTensorContainer:
    """A tensor, or the way to one."""

    def __init__(self, tensor: Any, handle: dict[str, Any]) -> None:
        self._tensor = tensor
        self._handle = handle

    @classmethod
    def from_tensor(cls, tensor: Any) -> "SharedTensorContainer":
        """Shares it, for as long as its owner keeps it."""
        number = next(_numbers)
        MEMORY[number] = weakref.ref(tensor, lambda _: MEMORY.pop(number, None))
        return cls(tensor, {"method_key": 2, "tensor_size": list(tensor.shape), "storage_handle": number})

    @classmethod
    def from_device(cls, tensor: Any) -> "SharedTensorContainer":
        """The same, as if the tensor were on a GPU."""
        shared = cls.from_tensor(tensor)
        return cls(tensor, {**shared.dump_to_dict(), "method_key": 1})

    def dump_to_dict(self) -> dict[str, Any]:
        """The handle."""
        return self._handle

    @classmethod
    def from_dict(cls, handle: dict[str, Any]) -> "SharedTensorContainer":
        """Opens a handle; one on device memory only once."""
        number = handle["storage_handle"]
        owned = MEMORY.pop(number, None) if handle["method_key"] == 1 else MEMORY.get(number)
        if owned is None:
            raise RuntimeError("the handle was read already")
        if (tensor := owned()) is None:
            raise RuntimeError("the memory behind the handle was given back")
        return cls(tensor, handle)

    def get_local_view(self) -> Any:
        """The tensor."""
        return self._tensor
