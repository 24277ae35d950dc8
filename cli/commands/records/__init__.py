"""The records of requests.

replay.py   runs one again, and compares the answers
why.py      explains one
request.py  writes records into a file; the request of a record, with what was not kept of it
"""
