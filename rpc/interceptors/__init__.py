"""The interceptors around every call on a server, so that a servicer's method is three lines. In the order of a call:

| module | subject |
|---|---|
| wrap | the one gRPC interceptor: applies the wrappers below to each method |
| behaviour | the types: a method's coroutine function, and what wraps it |
| reading | parses requests within limits, large ones in a thread; gzip |
| counting | counts a message's fields before it is parsed |
| wire | finds the field at fault in bytes that do not parse |
| arrival | when a call arrived, and the size of its message |
| running | counts running calls, so that a server can wait for them |
| logging | the request id on every log line; one line at the end of a call |
| errors | turns an exception into a status: the only broad `except` of a call |
| tracing | a span for each call of a request |
| authorizing | refuses callers without the role that a method needs |
"""
