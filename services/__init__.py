"""The worker: `python -m services CONFIG`.

control.py                       what every worker answers: model, load, abort, drain
server.py                        the start-up of a worker, in order
worker.py                        a worker that serves: health, supervision, drain
parts.py                         what the services of a worker's roles are made of
worker_engines.py                the engines that the roles need
identity.py                      id, roles and epoch; the record in the registry
config.py                        the configuration
keeping.py                       a worker that has a keeper

roles/        one module each: encode, prefill, decode, embed, diffuse
keeper/       the process that holds what outlives the worker's, and starts it again
sleeping/     models that share memory: who has it, and a worker's sleep
requests/     calls, prompts and sampling parameters, fault injection
multimodal/   media of prompts and their embeddings
resume/       decodes that are kept for the next router
moving/       decodes that go on elsewhere, and changes of role
handoff/      leases on KV: the owner's side and the reader's
transports/   how blocks move between workers: shm, tcp, nixl, and those of other distributions
engines/      pytorch, simulated, vllm, sglang, trtllm, and the Protocols that they fulfil
telemetry/    metrics, spans, timings
"""
