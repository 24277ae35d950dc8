"""The version of the client library; baton-serving has the same one."""

__version__ = "0.1.0"
