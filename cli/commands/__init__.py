"""The commands of `baton`: each is an `async def` that takes the arguments and returns the exit code.

generate.py, explain.py, chat.py   send a prompt, ask where it would run, hold a conversation
draw.py                            draws pictures, prints the vectors of texts
offers.py                          a deployment's models and limits, and what its tenants use
workers.py                         workers: their load, their adapters, and what runs on them
health.py                          asks any process for its health
doctor.py                          diagnoses an installation, a cluster or a deployment
up.py, cluster.py                  start a local cluster; its processes, its logs, its end
traces.py                          shows traces, and checks one
benchmarks/                        put load on servers and report what came of it
records/                           write the record of a request, run it again, explain it
"""
