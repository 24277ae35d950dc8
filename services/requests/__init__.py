"""Requests on a worker, before they reach an engine.

calls.py             running calls: admitted once, counted, stopped
bounds.py            lengths of names and digests that callers send
prompts.py           prompts and sampling parameters, read and checked
loras.py             adapters of requests and of operators' calls
decoded.py           the events of a decode, and their messages
fault_injection.py   the faults that a request's fault plan asks for
"""
