"""Baton's router beside other projects' routers: `make bench-router`.

| module | subject |
|---|---|
| environments | installs the peers from PyPI, into environments of their own |
| compare | the command line, and the rounds |
| routers | how each router is started, and how load reaches it |
| baton_router | Baton's router as a process of any interpreter |
| dynamo | Dynamo's frontend, with its mocker as the workers |
| edge | Envoy before a router |
| workers | Baton's workers, with simulated engines |
| engine | the workers of routers that relay bytes: an HTTP engine whose answers are ready-made |
| grpc_engine | the workers of smg's way by gRPC |
| cores | which core each process runs on |
| clients | the load |
| lost_router | streams that are lost with their router |
| long_prompts | prompts of 8,000 to 100,000 tokens, new and mostly sent before |
| measure | one round of one load: its cost and its latencies |
| report | the tables, as Markdown |
| plot | the bars, as SVG |
"""
