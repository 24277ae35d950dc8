"""Guards of speed stand under tests/costs, which has their mark, so that a failure elsewhere is about an answer."""

import re

from tools.structure import ROOT

TIMES_OF_THE_CPU = re.compile(
    r"\b(thread_time|process_time|cpu_times)\(|from support\.(calibration|growth|loop_turns)\b"
)
OTHERS = {
    # The part of a core that a wait takes is what it is about.
    "services/engines/pytorch/kv_cache/test_device_memory.py",
    # Calls in each turn of the loop are counted, and nothing is timed.
    "http2/test_turns.py",
    "router/openai/test_http_turns.py",
}


def test_no_test_elsewhere_has_a_bound_on_the_time_of_the_cpu() -> None:
    tests = ROOT / "tests"
    found = {
        str(path.relative_to(tests))
        for path in tests.rglob("test_*.py")
        if TIMES_OF_THE_CPU.search(path.read_text()) and path.parent != tests / "costs"
    }
    assert found == OTHERS
