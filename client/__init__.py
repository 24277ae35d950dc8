"""The `baton` command and the Python client; see client/api.py."""
