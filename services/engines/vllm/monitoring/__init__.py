"""Reports of a running vLLM.

event_reader.py   the prefix cache by vLLM's events, which it reads from sockets, and asks for again if lost
metrics.py        the adapter's metrics, and vLLM's own
"""
