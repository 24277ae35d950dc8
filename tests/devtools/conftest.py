"""The `baton` command, and a small cluster, as fixtures."""

from support.cluster.command_fixtures import baton, cluster, environment

__all__ = ["baton", "cluster", "environment"]
