"""Ports of this machine; `baton_http2.sockets` has the sockets of servers.

| module | subject |
|---|---|
| ports | tells if a port is free, or listening |
| listening | addresses of a configuration, and ports that processes share |
"""
