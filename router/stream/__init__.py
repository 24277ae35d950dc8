"""The answer to a client: its messages and its trailing metadata.

reply (the way back to a client, and the pace that it asks for), writer (streams messages at that pace), messages
(their parts), single_tokens (the tokens of a running stream, without a coroutine),
collector (makes one response of them).
"""
