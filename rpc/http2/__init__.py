"""gRPC on HTTP/2 of our own: a server beside grpc.aio's, for the same servicers and interceptors.

Its reason is the cost of a message: what one turn of the event loop writes for all streams of a connection goes out
in one write.

In reading order: endpoint (a connection, as its parts know it), server (methods, sockets, end), connection (one
client's), receiver and control (its frames, held to the protocol and to budgets), stream (one call's bytes and flow
control), call (task, deadline, status), context (what a servicer sees of its call), room
(waits until a peer has read enough), output (what a connection sends), liveness (keepalive, age, slow readers, drain),
limits (settings, budgets, metrics), security (TLS); `wire` has what frames, header blocks and messages are, `client` a
client of the same parts.
"""
