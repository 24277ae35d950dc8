"""The contract with sessions about prefix caches: what requests say of their KV, and what becomes of it.

contract.py   CacheOptions: their checks, and as workers get them
marks.py      how many tokens of a chat's prompt come before a place in the chat
ending.py     EndSession, for all workers of a model

Engines decide: see services/engines/pytorch/kv_cache/retention.py.
"""
