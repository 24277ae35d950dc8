"""Memory of a GPU that outlives the process which made it. Only on a GPU: `BATON_TEST_DEVICE=cuda` runs it."""

import os
import signal
import socket
import subprocess
import sys

import pytest
import torch
from support.engines.device import DEVICE

from services.engines.memory.device_file import device_file, map_device_file
from services.engines.memory.device_memory import DeviceUnavailable
from services.engines.memory.tensor_file import read_tensors, write_tensors

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU, and BATON_TEST_DEVICE=cuda")

_BYTES = 5 << 20
_OWNER = """
import os, signal, socket, torch
from services.engines.memory.device_file import device_file, map_device_file
device = torch.device("cuda", 0)
descriptor = device_file({size}, device)
memory = map_device_file(os.dup(descriptor), {size}, device)
memory[-4:] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8, device=device)
torch.cuda.synchronize()
socket.send_fds(socket.socket(fileno={end}), [b"x"], [descriptor])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def test_new_memory_is_zero_and_all_mappings_see_what_one_writes(device: torch.device) -> None:
    descriptor = device_file(_BYTES, device)
    first, second = (map_device_file(each, _BYTES, device) for each in (os.dup(descriptor), descriptor))
    assert first.shape == (_BYTES,)
    assert not first.any()
    first.view(torch.bfloat16)[100] = 2.0
    assert second.view(torch.bfloat16)[100] == 2.0


def test_what_a_killed_process_wrote_is_found(device: torch.device) -> None:
    own, end = socket.socketpair()
    with own, end:
        program = _OWNER.format(size=_BYTES, end=end.fileno())
        killed = subprocess.run([sys.executable, "-c", program], pass_fds=[end.fileno()], check=False)
        assert killed.returncode == -signal.SIGKILL
        _, [descriptor], _, _ = socket.recv_fds(own, 1, 1)
    assert map_device_file(descriptor, _BYTES, device)[-4:].tolist() == [1, 2, 3, 4]


def test_memory_is_freed_with_the_last_tensor_and_descriptor(device: torch.device) -> None:
    free = torch.cuda.mem_get_info(device)[0]
    descriptor = device_file(1 << 30, device)
    memory = map_device_file(os.dup(descriptor), 1 << 30, device)
    part = memory[:8]
    del memory
    os.close(descriptor)
    assert torch.cuda.mem_get_info(device)[0] < free - (900 << 20)
    assert part.sum() == 0
    del part
    assert torch.cuda.mem_get_info(device)[0] > free - (100 << 20)


def test_another_descriptor_size_or_too_much_are_refused(device: torch.device) -> None:
    with pytest.raises(DeviceUnavailable, match="cannot be opened"):
        map_device_file(os.memfd_create("other"), _BYTES, device)
    with pytest.raises(DeviceUnavailable, match="cannot be mapped"):
        map_device_file(device_file(_BYTES, device), 100 * _BYTES, device)
    with pytest.raises(DeviceUnavailable, match="cannot be allocated"):
        device_file(1 << 50, device)


def test_tensors_are_found_again_with_their_names_and_facts(device: torch.device) -> None:
    shared = torch.arange(6.0, device=device).view(2, 3)
    tensors = {"a": shared, "tied": shared, "b": torch.tensor([1, 2], dtype=torch.bfloat16, device=device)}
    found = read_tensors(write_tensors(tensors, {"fact": 1}), device)
    assert found.facts == {"fact": 1}
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items())
    assert found.tensors["a"] is found.tensors["tied"]
