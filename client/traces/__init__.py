"""A viewer of traces that needs nothing else: an OTLP receiver, a bounded store, Jaeger's query API, and a page."""
