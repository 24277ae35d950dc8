"""Restores the logging configuration."""

from support.restored_logging import restored_logging

__all__ = ["restored_logging"]
