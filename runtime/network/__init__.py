"""Ports and sockets.

| module | subject |
|---|---|
| ports | whether a port is free, or listening |
| listening | sockets that listen, at a port that processes may share |
| accepting | connections that are accepted, and what happens without descriptors |
| descriptors | the limit of file descriptors, and connections that stay below it |
"""
