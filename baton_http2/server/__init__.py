"""The server.

| module | subject |
|---|---|
| server | `Http2Server`: handlers, sockets, start and end |
| connection | the connections of clients, and what they share |
| call | one call: its task, its deadline, its end, and its context |
| servicer_context | the parts of a servicer's context that are the same however a call is carried |
| reply | `context.reply()`: the way back to a caller, and its wire |
| calls | the methods and the tasks of all calls; when each was read |
| methods | handlers as they are called; the caller of a call |
| peer | the client at the other end of a connection |
| refusal | the answer to what is not a call |
"""
