"""gRPC on HTTP/2 of our own: a server for grpc.aio's servicers and interceptors, and a client of streams.

Its reason is the cost of a message: what one turn of the event loop writes for all streams of a connection goes out
in one write. It is a distribution of its own, `baton-http2` (packaging/http2), and imports nothing else of Baton.

| module | subject |
|---|---|
| server/ | methods, sockets, connections of clients, calls and their contexts |
| client/ | one call on a connection of its own |
| endpoint | a connection as its parts know it: a server's or a client's |
| receiver, control | its frames, held to the protocol and to budgets |
| stream | the bytes of one call in both directions, within flow control |
| output | what a connection sends, in one write each turn of the event loop |
| liveness | handshake, keepalive, age, slow readers, drain |
| limits | settings, budgets of a connection, metrics |
| input_budget | memory and time of requests that are not read yet |
| output_budget | memory of answers that are not read yet |
| turns | waiting for a turn: calls beside others, writers whose peer is behind |
| security | TLS, and the identity of a peer |
| wire/ | frames, header blocks and messages |
| sockets/ | listening, accepting, descriptors |
| aio, clock | waits with a deadline, and the clocks |
"""
