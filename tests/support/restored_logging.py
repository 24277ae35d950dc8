"""A fixture that restores logging after a test that configures it."""

import logging
from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Restores the logging configuration after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    logging.captureWarnings(False)
    root.handlers[:], root.level = handlers, level
