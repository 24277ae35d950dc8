"""Tracing of calls: spans within a process, joined across processes by W3C trace context, exported over OTLP.

| module | subject |
|---|---|
| tracer | `configure_tracing` opens the Tracer of a process |
| span | `Span`, the current span, `stage_span` |
| recording | what a recorded span holds until it ends; how a span records an error |
| propagation | trace context in the metadata of calls |
| exporter | export over OTLP, its messages; the key `tracing` |

It is part of rpc/: a span follows a call, and the exporter needs the same TLS as channels.
"""
