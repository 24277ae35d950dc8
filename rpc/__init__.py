"""gRPC, done once for routers and workers.

| module | subject |
|---|---|
| server | `serve`: a server with health, reflection, interceptors, and a drain at its end |
| interceptors/ | what surrounds every call on a server: arrival, reading, errors, logs, spans, authorization |
| http2/ | the server `http2`: our own HTTP/2 |
| channels | channels to peers, with TLS and trace propagation |
| status | the table of error classes and status codes; outcomes as metric labels |
| health | `grpc.health.v1` |
| metadata | what a call carries beside its message |
| best_effort | calls that may fail |
| input_budget | memory and time of requests that are not read yet |
| turns | how many calls begin, or end, in one turn of the event loop |
| leases | a lease on another worker's blocks: renewal and release |
| sampling_rules, violations | the ranges of sampling parameters; collects the wrong fields of a request |
| timeouts | how long a process waits for its peers |
| fault_injection | the fault plans in a request's metadata, for tests |
| auth/ | TLS, certificates, tokens, roles |
| multiplex/ | many calls to one peer over one stream |
| tracing/ | spans of calls: recording, propagation, export over OTLP |
"""
