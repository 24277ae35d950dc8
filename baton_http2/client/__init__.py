"""gRPC's client side on HTTP/2 of our own: one call with streams of messages, on a connection of its own.

Messages are given to the caller as they are read from the socket, without a task or a thread in between, and what it
writes in one turn of the event loop goes out in one write.

call (the call: its messages and its status), connection (frames, windows and keepalive, by the parts that the server
has), dialing (how it is opened and closed).
"""
