"""Running a process, whatever it serves. Nothing here knows gRPC, or language models.

| module | subject |
|---|---|
| process | the event loop, signals, exit codes |
| config | one YAML file and `key=value` overrides, read into a typed model |
| settings | environment variables and `--help` for every setting |
| telemetry | logs, metrics, and their HTTP server |
| lasting | tasks that last as long as the process |
| garbage | garbage collection without long pauses |
| machine | the memory that this process may still take, and the GPUs that it may use |
| clock, entropy, threads | the clocks, secrets and ids, and threads of this process, each in one place |
| aio | task groups, timeouts, waits that a cancellation does not interrupt |
| network | ports and listening sockets |
"""
