"""Sockets of servers.

| module | subject |
|---|---|
| listening | sockets that listen, at a port that processes may share |
| accepting | connections that are accepted, and how a server goes on without descriptors |
| descriptors | the limit of file descriptors, and connections that stay below it |
"""
