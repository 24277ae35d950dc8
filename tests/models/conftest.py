"""The demonstration checkpoint, loaded once."""

from pathlib import Path

import pytest
import torch

from models.demo.evaluate import Examiner

DEMO = Path(__file__).parents[2] / "models" / "demo"


@pytest.fixture(scope="session")
def examiner() -> Examiner:
    torch.set_num_threads(1)
    return Examiner.of_checkpoint(DEMO)
