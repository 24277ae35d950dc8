"""Answers that go on when their router, or their client's connection, is lost.

* `handle.py`: the secret by which a client, and any router, finds an answer again; what a request asks for, and what a
  client has of an answer.
* `record.py`: what the decode worker of an answer keeps for other routers.
* `replay.py`: an answer whose first tokens are known: their text again, without what its client has.
* `finding.py`: the workers that have an answer.
* `attaching.py`: the answers of a handle on their workers.
* `reattaching.py`: an answer whose worker's process was lost, in the worker's next process.
* `execution.py`: one answer that goes on, on the worker that still runs it or on another.
* `resumer.py`: ResumeGeneration, from the handle to the end of the stream.
"""
