"""Stands in for NVIDIA's bindings of NVML, of the package nvidia-ml-py: two GPUs, of which the second tells no load.

Only what Baton calls, and as the package has it. Put this folder before the package in PYTHONPATH.
"""

from types import SimpleNamespace

NVML_TEMPERATURE_GPU = 0
GIB = 2**30
_UUIDS = {"GPU-aaaa": 0, "GPU-bbbb": 1}


class NVMLError(Exception):
    pass


def nvmlInit() -> None:
    pass


def nvmlShutdown() -> None:
    pass


def nvmlDeviceGetCount() -> int:
    return 2


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    if index >= nvmlDeviceGetCount():
        raise NVMLError("Invalid Argument")
    return index


def nvmlDeviceGetHandleByUUID(uuid: str) -> int:
    if uuid not in _UUIDS:
        raise NVMLError("Not Found")
    return _UUIDS[uuid]


def nvmlDeviceGetMemoryInfo(gpu: int) -> SimpleNamespace:
    return SimpleNamespace(total=80 * GIB, used=(60 + gpu) * GIB, free=(20 - gpu) * GIB)


def nvmlDeviceGetUtilizationRates(gpu: int) -> SimpleNamespace:
    if gpu:
        raise NVMLError("Not Supported")
    return SimpleNamespace(gpu=75, memory=30)


def nvmlDeviceGetTemperature(gpu: int, sensor: int) -> int:
    assert sensor == NVML_TEMPERATURE_GPU
    return 61 + gpu
