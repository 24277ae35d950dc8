"""Running a process, whatever it serves. Nothing here knows gRPC, or language models.

| module | subject |
|---|---|
| process | the event loop, signals, exit codes |
| config | one YAML file and `key=value` overrides, read into a typed model |
| settings | environment variables and `--help` for every setting |
| logs | structured logs on stderr; the key `log` |
| metrics | the metrics registry, event loop lag |
| frequent_metrics | cheaper histograms and counters, for every token and request |
| lasting | tasks that last as long as the process |
| garbage | garbage collection without long pauses |
| machine | the memory that this process may still take, and the GPUs that it may use |
| monitor | the HTTP server for /metrics and /health |
| clock, entropy, threads | the clocks, secrets and ids, and threads of this process, each in one place |
| aio | task groups, timeouts, waits that a cancellation does not interrupt |
| network | ports and listening sockets |
"""
