"""Reports of a running TensorRT-LLM.

monitor.py        reads statistics and KV events; tests an idle engine
metrics.py        the adapter's metrics and TensorRT-LLM's own
kv_events.py      the prefix cache's contents, by the hash chain that routers know
"""
