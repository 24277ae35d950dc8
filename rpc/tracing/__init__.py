"""Traces: spans that are made where time passes, and joined across processes by W3C trace context.

`configure_tracing` opens a Tracer, `rpc.serve` continues or begins a trace with each call, `stage_span` adds to it,
and every channel of `rpc.channels` passes it on.
"""
