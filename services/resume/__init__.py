"""Decodes that go on without their reader, until a router takes them over or their grace ends.

* `stream.py`: one kept decode: its ids, its owner, and who reads it.
* `reader.py`: the call of one router, which reads a kept decode.
* `streams.py`: all kept decodes of a worker, and their bounds.
"""
