"""A mark for tests that need modules of Python's, where `make compiled` runs them on machine code."""

from types import ModuleType

import pytest


def interpreted(*modules: ModuleType) -> pytest.MarkDecorator:
    """Skips a test that replaces what is in these modules, where they are compiled: constants and classes are fixed."""
    is_compiled = any(str(module.__file__).endswith((".so", ".pyd")) for module in modules)
    return pytest.mark.skipif(is_compiled, reason="replaces what a compiled module has fixed")
