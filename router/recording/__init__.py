"""Records of requests that have ended: why they went as they did, and how to run them again (docs/replay.md).

notes.py (what is noted while a request runs), record.py (the message that is made of it at its end), recorder.py (which
requests are recorded, and the task that makes the records), table.py (those in memory), folder.py (those in files),
finding.py (the records of all routers).
"""
