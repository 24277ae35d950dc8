"""gRPC, done once for routers and workers. Nothing here knows a language model.

| module | subject |
|---|---|
| server | `serve`: a server with health, reflection, interceptors, and a drain at its end |
| interceptors/ | what surrounds every call on a server: arrival, reading, errors, logs, spans, authorization |
| channels | channels to peers, with TLS and trace propagation; calls that may fail |
| status | the table of error classes and status codes; outcomes as metric labels |
| health | `grpc.health.v1` |
| metadata | what a call carries beside its message |
| violations | collects the wrong fields of a request |
| timeouts | how long a process waits for its peers |
| auth/ | TLS, certificates, tokens, roles |
| tracing/ | spans of calls: recording, propagation, export over OTLP |
"""
