"""The protocol of routers and workers beside the protos: engine calls, handoff leases and sampling rules.

| module | subject |
|---|---|
| lane | the contracts of the way of a token: sources, sinks, wires |
| multiplex/ | many engine calls to one worker over one stream |
| leases | a lease on another worker's blocks: renewal and release |
| request_rules | checks of sampling parameters, and of pictures and clips to draw |
| roles | the roles of workers, one declaration each |
| prefix_hash | the hash chain of a prompt's blocks, by which all name them; digests of tenants and sessions |
| timing_profile | the measured speed of a model, and its file |
| fault_injection | the fault plans in a request's metadata, for tests |
"""
