"""vLLM behind Baton beside vLLM's own servers, on two GPUs of one host. See `python -m benchmarks.vllm_gpu --help`."""
