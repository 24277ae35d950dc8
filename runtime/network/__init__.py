"""Ports and sockets.

| module | subject |
|---|---|
| ports | whether a port is free, or listening |
| listening | sockets that listen, at a port that processes may share |
"""
