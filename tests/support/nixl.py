"""Whether NIXL is installed, for tests of the transport that needs it."""

import os
from importlib.util import find_spec

import pytest

INSTALLED = any(find_spec(name) for name in ("nixl_cu13", "nixl_cu12", "nixl"))

# Where CI is set, its absence is a failure.
needs_nixl = pytest.mark.skipif(
    not INSTALLED and "CI" not in os.environ, reason="NIXL is not installed: pip install 'baton-serving[nixl]'"
)

# A value of a parameter named `transport`.
NIXL = pytest.param("nixl", marks=needs_nixl)
