"""Logs, metrics and health of a process.

| module | subject |
|---|---|
| logs | structured logs on stderr; the key `log` |
| metrics | the metrics registry, event loop lag |
| frequent_metrics | cheaper histograms and counters, for every token and request |
| monitor | the HTTP server for /metrics and /health |
"""
