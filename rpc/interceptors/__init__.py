"""The interceptors around every call on a server, so that a servicer's method is three lines. In the order of a call:

| module | subject |
|---|---|
| wrap | the one gRPC interceptor: applies the wrappers below to each method; `reply()` for grpc.aio's contexts |
| reading | parses requests within limits, large ones in a thread; gzip |
| counting | counts a message's fields before it is parsed |
| wire | finds the field at fault in bytes that do not parse |
| calls | when a call arrived, its message's size, its caller's role; the number of running calls |
| logging | the request id on every log line; one line at the end of a call |
| errors | turns an exception into a status: the only broad `except` of a call |
| tracing | a span for each call of a request |
"""
