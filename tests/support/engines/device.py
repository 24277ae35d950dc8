"""Where and how the embedded engine computes in this test run.

BATON_TEST_DEVICE is cpu if unset; `make gpu` sets cuda. BATON_TEST_EXECUTION is the engine's setting, auto if unset.
"""

import os

DEVICE = os.environ.get("BATON_TEST_DEVICE", "cpu")

EXECUTION = os.environ.get("BATON_TEST_EXECUTION", "auto")

ON_DEVICE: dict[str, object] = {"device": DEVICE, "dtype": "float32", "block_tokens": 16}
"""Settings of the engine that make every device compute the same ids: the plain model's dtype, the CPU's blocks."""
