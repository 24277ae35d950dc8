"""The answer to a client: its messages and its trailing metadata.

reply (the way back to a client, and the pace that it asks for), writer (streams messages at that pace), messages (their
parts), collector (makes one response of them).
"""
