"""The answers that clients stream, `baton.Generation` and `baton.AsyncGeneration`, which go on after a loss.

requests.py       the arguments of an answer, and the request that they make
sync.py           `Generation`, of `Client`
asynchronous.py   `AsyncGeneration`, of `AsyncClient`
resuming.py       what a client has of a kept answer, and how it asks for the rest
inquiries.py      how it finds out that a silent router is lost
"""
