"""Objects that a process keeps lie in huge pages, where the kernel makes them."""

import re
import subprocess
import sys

import pytest
from support.cluster.processes import ROOT

PROGRAM = """
from runtime.pages import use_huge_pages
kept = [b"x" * 400 + bytes([n % 256]) for n in range(50_000)]
made = use_huge_pages()
print(made, all(one == b"x" * 400 + bytes([n % 256]) for n, one in enumerate(kept)))
print(open("/proc/self/smaps").read())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_objects_that_are_kept_lie_in_huge_pages() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    made, is_whole = ran.stdout.split()[:2]
    kilobytes = sum(map(int, re.findall(r"AnonHugePages: +(\d+)", ran.stdout)))
    assert is_whole == "True"
    assert kilobytes == int(made) * 2048
    if made == "0":
        pytest.skip("the kernel makes none here")
