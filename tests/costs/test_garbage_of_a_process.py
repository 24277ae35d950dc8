"""Full garbage collections do not look at what a router's process has made by the time it serves."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.cluster.processes import ROOT

PROGRAM = """
import gc, sys
from router.__main__ import main
main()
print(gc.get_freeze_count(), len(gc.get_objects()))
"""


@pytest.mark.timeout(120)
def test_nearly_all_objects_of_a_router_that_serves_are_exempt_from_collection(tmp_path: Path) -> None:
    overrides = ["listen=127.0.0.1:0", "metrics_listen=127.0.0.1:0", f"registry={{kind: file, folder: {tmp_path}}}"]
    command = [sys.executable, "-c", PROGRAM, str(ROOT / "deploy/config/router.yaml"), *overrides]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as router:
        assert router.stdout
        lines = []
        for line in router.stdout:
            lines.append(line)
            if "router listens" in line:
                router.terminate()
        assert router.wait() == 0, "".join(lines)
    exempt, others = map(int, lines[-1].split())
    # The imports alone are over 100,000 objects.
    assert others < exempt / 10, lines[-1]
