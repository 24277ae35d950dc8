"""Fixtures that all tests share. This file also puts tests/ on the import path, for `support`."""
