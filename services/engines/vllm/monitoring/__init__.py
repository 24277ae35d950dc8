"""Reports of a running vLLM.

statistics.py     the statistics of its steps
kv_events.py      the contents of its prefix cache, by the hash chain that routers know
event_reader.py   reads these events from vLLM's sockets, and asks for lost ones again
metrics.py        the adapter's metrics, and vLLM's own
"""
