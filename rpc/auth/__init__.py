"""Callers, and which methods they may call.

| module | subject |
|---|---|
| access | the key `auth`; which roles may call a method; bearer tokens, read from a file |
| caller | a caller's name and role; the URI `baton://ROLE/NAME` |
| tls | the keys `tls.listen` and `tls.call`: credentials for gRPC, contexts for sockets; this process's identity |
"""
