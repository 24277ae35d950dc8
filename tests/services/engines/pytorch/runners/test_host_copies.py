"""Numbers of steps between host memory and the device, which a kernel copies on a GPU."""

import numpy as np
import torch
from support.engines.device import DEVICE

from services.engines.pytorch.runners.host_copies import HostCopies


def test_numbers_that_change_after_they_were_sent_arrive_as_they_were() -> None:
    copies, into = (
        HostCopies(torch.device(DEVICE)),
        [torch.zeros(5000, dtype=torch.int32, device=DEVICE) for _ in "abc"],
    )
    for number, each in enumerate(into):
        numbers = np.arange(5000, dtype=np.int32) + number
        copies.send(numbers, each)
        if DEVICE != "cpu":
            numbers[:] = -1
    for number, each in enumerate(into):
        assert each.tolist() == list(range(number, 5000 + number))


def test_a_part_of_each_row_comes_back() -> None:
    copies = HostCopies(torch.device(DEVICE))
    outcome = torch.arange(16, device=DEVICE).view(2, 8) + (1 << 40)
    home, wait = copies.bring(outcome[:, :3])
    wait()
    assert (home - (1 << 40)).tolist() == [[0, 1, 2], [8, 9, 10]]
    assert home.device.type == "cpu"


def test_no_rows_come_back_as_none() -> None:
    home, wait = HostCopies(torch.device(DEVICE)).bring(torch.zeros(2, 0, dtype=torch.int64, device=DEVICE))
    wait()
    assert home.shape == (2, 0)
