"""Answers that outlive their connection and their router, over HTTP: see docs/streams.md.

event_ids.py    the ids of a stream's events, with which `Last-Event-ID` tells what the client has
responses.py    the events of a response, numbered by its text
streams.py      chats and completions that go on after the event that a client names, without what it has
"""
