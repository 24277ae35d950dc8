"""vLLM behind Baton beside vLLM's own servers, on two GPUs of one host. See `python -m benchmarks.vllm_gpu --help`.

servers.py  both pairs of engines
model.py    the checkpoint that they load
load.py     requests from several processes
"""
