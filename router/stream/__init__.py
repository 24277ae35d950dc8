"""The answer to a client: its messages and its trailing metadata.

lane (ClientLane: every message of an answer, to its client's wire; a token at the least cost), general (what has not
been sent yet, and the message that it becomes), meter (counts and times tokens), writer (waits for a client that is
behind), reply (the pace that a client asks for, and the timings at the end), collector (makes one response of all
messages).
"""
