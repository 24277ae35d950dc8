"""Decodes that go on without their reader, until a router takes them over or their grace ends.

* `stream.py`: one kept decode: its ids, its owner, and who reads it.
* `logprobs.py`: the log probabilities of a kept decode.
* `reader.py`: the call of one router, which reads a kept decode.
* `attaching.py`: the answer to an Attach, and its checks.
* `takeover.py`: what the journal has of each, and what the worker's next process makes of it.
* `graces.py`: when each goes.
* `streams.py`: all kept decodes of a worker, and their bounds.
"""
