"""Reports of a running vLLM.

kv_events.py   the events of its prefix cache, as blocks of our hash chain
metrics.py     the adapter's metrics, and vLLM's own
"""
