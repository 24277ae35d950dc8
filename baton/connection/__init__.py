"""The parts of a call that both clients share. `Tls` and `Retry` are public, as `baton.Tls` and `baton.Retry`.

credentials.py    `Tls`, and tokens; the keys of the metadata that a call carries
retry.py          `Retry` and `Resume`: which failed calls are made again, after which pause, and which answers go on
routers.py        the routers of a deployment: the one that is called now, and the next after its loss
settings.py       the checked arguments of a client, and the attempts of one call; the options of gRPC channels
tracing.py        the span of a call, and the trace context that it sends
"""
