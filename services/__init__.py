"""The worker: `python -m services CONFIG`.

encode.py prefill.py decode.py embed.py diffuse.py   one role each: servicer, logic and conversion
decode_work.py                   the work of a decode, as its request describes it
control.py                       what every worker answers: model, load, abort, drain
server.py                        the start-up of a worker, in order
worker.py                        a worker that serves: health, supervision, drain
parts.py                         what the services of a worker's roles are made of
worker_engines.py                the engines that the roles need
identity.py                      id, roles and epoch; the record in the registry
config.py                        the configuration
keeping.py                       a worker that has a keeper

keeper/       the process that holds what outlives the worker's, and starts it again
sleeping/     models that share memory: who has it, and a worker's sleep
requests/     calls, prompts and sampling parameters, fault injection
multimodal/   media of prompts and their embeddings
resume/       decodes that are kept for the next router
moving/       decodes that go on elsewhere, and changes of role
handoff/      leases on KV: the owner's side and the reader's
transports/   how blocks move between workers: shm, tcp, nixl, and those of other distributions
engines/      pytorch, simulated, vllm, trtllm, and the Protocols that they fulfil
telemetry/    metrics, spans, timings
"""
