"""The part of a start that a process has done when the next ones are forked from it."""

import subprocess
import sys

import pytest
from support.cluster.processes import ROOT

_PROGRAM = """
import sys
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.model.loading import load_model
from services.engines.pytorch.preparing import prepare

config = PyTorchConfig(model="models/demo", device="cpu")
prepare(config)
before = set(sys.modules)
load_model(config)
print(sorted(each for each in sys.modules.keys() - before if each.startswith("torch")))
"""


@pytest.mark.slow  # a process that imports torch: 5 s of a processor
def test_no_process_that_is_forked_imports_more_of_torch_to_load_a_model_on_a_cpu() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
