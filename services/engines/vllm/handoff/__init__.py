"""KV that moves between two vLLM engines through its NixlConnector.

state.py          the state of a handoff, typed, written and checked
held.py           KV that vLLM holds for readers, and until when
"""
