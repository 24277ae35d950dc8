"""The parts of benchmarks/gpu_two.py, each a program that prints Markdown: `python -m benchmarks.two_gpus.PART`.

machine.py           the GPUs, and how fast they copy between them
transfer.py          pulls between two GPUs over cuda_ipc, and NIXL beside it
beside_decode.py     gaps between tokens while KV is pulled
faults.py            owners that are killed, stopped, or free their memory
tensor_parallel.py   the same ids on two GPUs, and the decode step
first_token.py       the first token of a long prompt, through gRPC
serving.py           disaggregated beside aggregated workers under load
report.py            tables, and which GPU a process sees
"""
