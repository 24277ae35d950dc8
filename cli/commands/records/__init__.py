"""The records of requests: record.py (into a file), replay.py (runs one again), why.py (explains one).

comparing.py (two runs of a request: the first token that differs, and what was different), request.py (the request of a
record, with what was not kept of it), page.py (the text of `baton why`).
"""
