"""The answer to a client: its messages and its trailing metadata.

lane (ClientLane: every message of an answer, to its client's wire; a token at the least cost), general (what has not
been sent yet, the message that it becomes, and the pace that a client asks for), meter (counts and times tokens),
writer (waits for a client that is behind), collector (makes one response of all messages).
"""
