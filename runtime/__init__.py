"""Running a process, whatever it serves. Nothing here knows gRPC.

| module | subject |
|---|---|
| process | the event loop, signals, exit codes |
| config | one YAML file and `key=value` overrides, read into a typed model |
| settings, command_line | environment variables and `--help` for every setting |
| logs | structured logs on stderr; the key `log` |
| metrics | the metrics registry, event loop lag |
| frequent_metrics | cheaper histograms and counters, for every token and request |
| lasting | tasks that last as long as the process |
| garbage | garbage collection without long pauses |
| available_memory | the memory that this process may still take |
| monitor | the HTTP server for /metrics and /health |
| clock, entropy, threads | the clocks, secrets and ids, and threads of this process, each in one place |
| aio | task groups, timeouts, waits that a cancellation does not interrupt |
| daemon_call | calls that may never return, in daemon threads |
| prefix_hash | the hash chain of a prompt's blocks |
| timing_profile | the measured speed of a model, and its file |
| gpus | the GPUs that this process may use |
| network | ports and listening sockets |
"""
