"""One module for each command of `baton`; each has `async def run(arguments) -> int`, which returns the exit code.

generate.py, explain.py, chat.py     send a prompt, ask where it would run, hold a conversation
embed.py                             prints the vectors of texts
draw.py                              draws a picture into a file
lora.py                              lists, loads and unloads adapters
info.py, models.py, workers.py       ask a router what it offers
placing.py                           moves what a worker runs, drains it, or changes its role
tenants.py                           asks a router what each tenant uses
health.py                            asks any process for its health
doctor.py                            diagnoses an installation, a cluster or a deployment
benchmarks/                          put load on servers and report what came of it
records/                             write the record of a request, run it again, explain it
tracing/                             show traces, and check one
local/                               start, stop and watch the local cluster: up, down, status, logs
"""
