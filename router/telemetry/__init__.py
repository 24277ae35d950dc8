"""The records about requests. Nothing here decides anything.

stats.py            RequestStats: the facts about one request
timings.py          Timings: where its time went, also as trailing metadata
stages.py           the entries of Timings, and the division of a worker call
request_metrics.py  feeds the metrics, the span and the log line of a request
metrics.py          the Prometheus metrics, docs/metrics.md
spans.py            the attributes of spans, docs/tracing.md
"""
