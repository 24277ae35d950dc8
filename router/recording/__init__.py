"""Records of requests that have ended: why they went as they did, and how to run them again (docs/replay.md).

notes.py (what is noted while a request runs), record.py (the message that is made of it at its end), recorder.py (which
requests are recorded, the task that makes the records, those in files, and the records of all routers), table.py
(those in memory).
"""
