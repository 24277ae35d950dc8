"""The whole fleet in one process, on one event loop, in virtual time: `python -m simulation`, docs/simulation.md.

| module | subject |
|---|---|
| entropy | virtual clocks and seeded randomness; imported before anything of Baton |
| hashes | the same hashes in every process |
| loop | the event loop: time that jumps, order by the seed, nodes that are killed and paused |
| network, connection | hosts and connections, and what goes wrong with them |
| channel | grpc.aio's channels over Baton's own HTTP/2 client |
| transport, registry | KV that is read from others' pools, and records under leases |
| etcd | a simulated etcd, for the product's own client |
| facades | calls of the routers' other APIs |
| steps | the steps of requests, at which faults and clients are aimed |
| plan | what runs, what is asked and what goes wrong: what a file of it has |
| seeds | the plan of a seed |
| clients, chaos | who asks, and what goes wrong, as the plan says |
| reference | the right answers |
| processes | routers and workers by Baton's own assemblies, as a plan configures them |
| world | the fleet, from start to quiet |
| invariants/ | what must hold, one class each |
| running, shrink | runs of plans in forks of their own, and the smallest plan that still fails |
| elsewhere | the same plans again in another process, to compare the logs |
| fairness | fairness between tenants and shared quotas, beside their bars: a program of its own |
| mutants | planted bugs, and how long each takes to be found |
| plans/ | plans that have found something, which run for ever |
"""
