"""The parts of benchmarks/gpu_two.py, each a program that prints Markdown: `python -m benchmarks.two_gpus.PART`.

machine.py           the GPUs, and how fast they copy between them
transfer.py          pulls between two GPUs over cuda_ipc, and NIXL beside it
beside_decode.py     gaps between tokens while KV is pulled
faults.py            owners that are killed, stopped, or free their memory
tensor_parallel.py   the same ids on two GPUs, and the decode step
first_token.py       the first token of a long prompt, through gRPC
serving.py           disaggregated beside aggregated workers under load
decode_through_grpc.py  a decode step at the engine, and as a client of the router sees it
exchange.py          one exchange between two GPUs: by NCCL, and in each other's memory
cluster.py           a worker on each GPU and routers before them
model.py             an engine of 8B shape with random weights
report.py            tables, and which GPU a process sees
"""
