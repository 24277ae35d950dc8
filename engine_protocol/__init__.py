"""The protocol of routers and workers beside the protos: engine calls, handoff leases and sampling rules.

| module | subject |
|---|---|
| lane | the contracts of the way of a token: sources, sinks, wires |
| multiplex/ | many engine calls to one worker over one stream |
| leases | a lease on another worker's blocks: renewal and release |
| sampling_rules | checks of sampling parameters |
| roles | the roles of workers, one declaration each |
| fault_injection | the fault plans in a request's metadata, for tests |
"""
