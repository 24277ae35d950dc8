"""Many calls of one peer over one stream, where a message carries what all of them have to say.

The messages are those of protos/baton/engine/v1/multiplex.proto.

channel.py        the caller's side: a channel whose calls share a stream
peer_stream.py    how that stream reaches the peer: grpc.aio, or a connection of our own
running_calls.py  the calls that share a stream, and what the peer says to each
replies.py        the caller's side of one call: what has come, and its end
separate_call.py  a call with the same face and a stream of its own
service.py        the server's side: starts the calls of a stream, and stops them
call.py           one call on the server: its task, its deadline and the context that its servicer sees
response_queue.py what the calls of a stream have to send, and the next message of it
metadata.py       metadata and statuses as messages
"""
