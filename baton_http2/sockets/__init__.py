"""Sockets of servers.

| module | subject |
|---|---|
| accepting | sockets that listen; accepted connections, and how a server goes on without descriptors |
| descriptors | the limit of file descriptors, and connections that stay below it |
"""
