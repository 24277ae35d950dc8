"""Callers, and which methods they may call.

| module | subject |
|---|---|
| access | the key `auth`; which roles may call a method |
| caller | a caller's name and role; the URI `baton://ROLE/NAME` |
| tokens | bearer tokens, read from a file |
| tls | the keys `tls.listen` and `tls.call`: credentials for gRPC, contexts for sockets |
| certificates | the identity in this process's own certificate |
"""
